"""Files of tensors that can be trusted: safetensors with a format version and a checksum of all that they hold.

They are read by the safetensors package, and written here, tensor by tensor from its own memory: the package's `save`
copies all of them twice and holds Python's lock meanwhile, so that training would wait for a checkpoint.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from fedobp.errors import FedobpError, first_line, out_of_memory, short
from fedobp.files import atomic_write, regular

FORMAT = 1

# What safetensors calls the types of tensors, in the order in which it stores them: so that each is aligned.
_TYPES: Final = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write tensors with JSON metadata, and return their checksum."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        if tensor.dtype not in _TYPES:
            raise FedobpError(
                f"'{short(name)}' is of type {tensor.dtype}, which files do not hold: use float32 or int64"
            )
    checksum = _checksum(stored, about)
    # One metadata key, whose values stand in the order given: equal runs must have equal bytes.
    metadata = {"format": FORMAT, "sha256": checksum, **about}
    with atomic_write(path) as file:
        _write(file, stored, {"fedobp": json.dumps(metadata)})
    return checksum


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write what `safetensors.torch.save` returns: the length of a header, the header, and the tensors."""
    order = list(_TYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_memory(tensors[name]))


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a file's tensors and metadata, with its checksum; a file that is not as it was written is a user error."""
    from safetensors import SafetensorError, safe_open

    where = short(path, 200)
    try:
        with safe_open(regular(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})["fedobp"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        version, checksum = about.pop("format", 0), about.pop("sha256", None)
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise FedobpError(f"{where} is damaged, or is not fedobp's ({first_line(error)}): take another copy") from error
    if version == 0 and checksum is None:
        warnings.warn(f"{where} is of an older version of fedobp and has no checksum: it is not verified", stacklevel=2)
    elif version != FORMAT:
        raise FedobpError(f"{where} has format {short(version)}, and this fedobp reads {FORMAT}: use a newer fedobp")
    elif _checksum(tensors, about) != checksum:
        raise FedobpError(f"{where} is damaged: its checksum is not that of its content; take another copy")
    return tensors, {**about, "sha256": checksum}


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of metadata, names, types, shapes and values."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(_memory(tensor))
    return found.hexdigest()
