"""Files of tensors that can be trusted: safetensors with a format version and a checksum of all that they hold."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular, write

FORMAT = 1


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write tensors with JSON metadata, and return their checksum."""
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksum = _checksum(stored, about)
    # One metadata key: safetensors writes several in no fixed order, and equal runs must have equal bytes.
    metadata = {"format": FORMAT, "sha256": checksum, **about}
    write(path, save(stored, metadata={"fedobp": json.dumps(metadata)}))
    return checksum


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
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
