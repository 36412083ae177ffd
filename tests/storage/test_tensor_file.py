"""Files of tensors: whatever is changed in one is noticed."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedobp import FedobpError
from fedobp.storage.tensor_file import read_tensors, write_tensors

TENSORS = {
    "weight": torch.tensor([[1.5, -2.0], [0.25, 3e-40]]),
    "index": torch.tensor([3, 1]),
    "half": torch.tensor([0.1], dtype=torch.bfloat16),
    "float16": torch.tensor([0.1], dtype=torch.float16),
    "int32": torch.tensor([7], dtype=torch.int32),
    "int16": torch.tensor([7], dtype=torch.int16),
    "int8": torch.tensor([-7], dtype=torch.int8),
    "bytes": torch.tensor([7, 8, 9], dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    **{
        str(dtype): torch.tensor([2]).to(dtype)
        for dtype in (
            torch.uint64,
            torch.uint32,
            torch.uint16,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    },
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}


def test_tensors_and_metadata_come_back(tmp_path: Path):
    checksum = write_tensors(tmp_path / "file", TENSORS, {"round": 3, "names": ["ä", "b"]})
    found, about = read_tensors(tmp_path / "file")
    assert about == {"round": 3, "names": ["ä", "b"], "sha256": checksum}
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (
        write_tensors(tmp_path / "again", dict(reversed(TENSORS.items())), {"names": ["ä", "b"], "round": 3})
        == checksum
    )


def test_files_are_those_of_the_safetensors_package(content: bytes, tmp_path: Path):
    size = 8 + int.from_bytes(content[:8], "little")
    assert save(TENSORS, metadata=json.loads(content[8:size])["__metadata__"]) == content


def test_a_type_that_files_do_not_hold_is_named(tmp_path: Path):
    with pytest.raises(FedobpError, match=r"'phase' is of type torch\.complex128, which files do not hold"):
        write_tensors(tmp_path / "file", {"phase": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "file"
    write_tensors(path, TENSORS, {"round": 3})
    return path.read_bytes()


@given(st.data())
def test_any_changed_byte_is_noticed(content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """A byte of blank space in the header is the exception: it changes nothing that is read."""
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "file"
    path.write_bytes(changed)
    try:
        found, about = read_tensors(path)
    except FedobpError:
        return
    assert about["round"] == 3
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert set(found) == set(TENSORS)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1])
def test_a_cut_file_is_refused(content: bytes, tmp_path: Path, cut: int):
    (tmp_path / "file").write_bytes(content[:cut])
    with pytest.raises(FedobpError, match="is damaged, or is not fedobp's"):
        read_tensors(tmp_path / "file")


def test_other_versions(content: bytes, tmp_path: Path):
    """A newer format is refused; a file from before there were checksums is read, with a warning."""
    tensors = load(content)
    (tmp_path / "newer").write_bytes(save(tensors, {"fedobp": json.dumps({"format": 2, "sha256": "?"})}))
    with pytest.raises(FedobpError, match="has format 2, and this fedobp reads 1: use a newer fedobp"):
        read_tensors(tmp_path / "newer")
    (tmp_path / "older").write_bytes(save(tensors, {"fedobp": json.dumps({"model": "mlp"})}))
    with pytest.warns(UserWarning, match="has no checksum: it is not verified"):
        _, about = read_tensors(tmp_path / "older")
    assert about["model"] == "mlp"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tmp_path / "none").write_bytes(save(tensors, {"fedobp": json.dumps({"format": 1})}))
        with pytest.raises(FedobpError, match="its checksum is not that of its content"):
            read_tensors(tmp_path / "none")
