"""The size and format of messages: the one codec that the simulator counts with and real nodes send.

A message is a header (magic, length, and a JSON list of fields) followed by the payload: for each field, the mask of a
`Sparse` value in its cheapest form, then the values. Masks are a bitmap, or a list of 4-byte positions of the smaller
side, kept or dropped. Only the payload is counted as traffic. Nothing is unpickled, and a message that is cut short,
too long, inconsistent or holds a value that is not finite is refused.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedobp.errors import FedobpError, first_line, short
from fedobp.records import Record, Sparse
from fedobp.transfer import AsyncCopy

_MAGIC = b"FOBP\x01"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def payload_bytes(record: Mapping[str, Tensor | Sparse]) -> int:
    """Return the payload of a whole cohort's messages; every tensor has a leading axis of clients."""
    return Payload(record).bytes()


class Payload:
    """The payload of a cohort's record that a device may still be computing: only `bytes` waits for it."""

    def __init__(self, record: Mapping[str, Tensor | Sparse]) -> None:
        whole = [value for value in record.values() if isinstance(value, Tensor)]
        self._whole = sum(value.numel() * value.element_size() for value in whole)
        self._masked = [
            (AsyncCopy(value.keep.sum(dim=-1)), value.keep.shape[-1], value.values.element_size())
            for value in record.values()
            if isinstance(value, Sparse)
        ]

    def bytes(self) -> int:
        """Wait for the counts, and return the number of bytes."""
        total = self._whole
        for counts, size, each in self._masked:
            for kept in map(int, counts.value()):
                total += kept * each + min(4 * kept, 4 * (size - kept), math.ceil(size / 8))
        return total


def encode(record: Record) -> bytes:
    """Return one client's message (no leading axis)."""
    fields: list[dict[str, Any]] = []
    payload: list[bytes] = []
    for name, value in record.items():
        values = value.values if isinstance(value, Sparse) else value
        entry: dict[str, Any] = {"name": name, "dtype": _NAMES[values.dtype], "shape": list(values.shape)}
        if isinstance(value, Sparse):
            entry["mask"], entry["listed"], mask = _encode_mask(value.keep.cpu().numpy())
            payload.append(mask)
            values = values[value.keep]
        fields.append(entry)
        payload.append(values.contiguous().cpu().numpy().tobytes())
    header = json.dumps(fields).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(header)), header, *payload])


def _encode_mask(keep: NDArray[np.bool_]) -> tuple[str, int, bytes]:
    """Return (form, positions listed, bytes) of a mask, in the cheapest of its three forms."""
    kept = int(keep.sum())
    form, listed = ("kept", kept) if kept <= len(keep) - kept else ("dropped", len(keep) - kept)
    if math.ceil(len(keep) / 8) < 4 * listed:
        return "bitmap", 0, np.packbits(keep).tobytes()
    return form, listed, np.flatnonzero(keep == (form == "kept")).astype("<u4").tobytes()


def header_bytes(message: bytes) -> int:
    """Return how much of a message is header, which traffic does not count."""
    if len(message) < len(_MAGIC) + 4 or not message.startswith(_MAGIC):
        raise FedobpError("a message does not start as one of fedobp's: sender and receiver must run the same version")
    return len(_MAGIC) + 4 + int(struct.unpack_from("<I", message, len(_MAGIC))[0])


def decode(message: bytes, shapes: Mapping[str, tuple[int, ...]]) -> Record:
    """Return the record of one client's message; what was not sent is NaN.

    The message must hold exactly the values that the receiver expects, in the shapes that it expects, so a sender
    can neither slip in another model nor make the receiver reserve more memory than that.
    """
    start = header_bytes(message)
    record: Record = {}
    try:
        fields = json.loads(message[len(_MAGIC) + 4 : start])
        sent = [(entry["name"], tuple(entry["shape"])) for entry in fields]
        if sorted(sent) != sorted(shapes.items()):
            raise FedobpError(
                f"a message holds {short(sent, 200)}, where {short(list(shapes.items()), 200)} is expected: both sides "
                "must use one model"
            )
        for entry in fields:
            dtype, shape = _DTYPES[entry["dtype"]], shapes[entry["name"]]
            if "mask" not in entry:
                values, start = _take(message, start, dtype, math.prod(shape))
                record[entry["name"]] = values.reshape(shape)
            elif dtype.is_floating_point and len(shape) == 1:
                keep, start = _decode_mask(message, start, entry["mask"], int(entry["listed"]), shape[0])
                values, start = _take(message, start, dtype, int(keep.sum()))
                unsent = torch.full(shape, math.nan, dtype=dtype)
                record[entry["name"]] = Sparse(unsent.masked_scatter(keep, values), keep)
            else:
                raise ValueError("a mask on what is no vector of floats")
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise FedobpError(
            f"a message of {len(message):,} bytes is damaged ({first_line(error)}): send it again"
        ) from error
    if start != len(message):
        raise FedobpError(f"a message is {len(message) - start:,} bytes longer than its header says: send it again")
    for name, value in record.items():
        found = value.values[value.keep] if isinstance(value, Sparse) else value
        if not torch.isfinite(found).all():
            raise FedobpError(
                f"a message holds NaN or infinite values in '{short(name)}': the sender's training diverged"
            )
    return record


def _take(message: bytes, start: int, dtype: torch.dtype, count: int) -> tuple[Tensor, int]:
    end = start + count * dtype.itemsize
    if count < 0 or end > len(message):
        raise ValueError("cut short")
    raw = bytearray(message[start:end])
    return (torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)), end


def _decode_mask(message: bytes, start: int, form: str, listed: int, size: int) -> tuple[Tensor, int]:
    if form == "bitmap":
        end = start + math.ceil(size / 8)
        if end > len(message):
            raise ValueError("cut short")
        bits = np.unpackbits(np.frombuffer(message[start:end], np.uint8), count=size)
        return torch.from_numpy(bits.astype(np.bool_)), end
    if form not in ("kept", "dropped"):
        raise ValueError(f"mask form '{form}'")
    end = start + 4 * listed
    if listed < 0 or end > len(message):
        raise ValueError("cut short")
    positions = np.frombuffer(message[start:end], "<u4").astype(np.int64)
    if listed and (positions.max() >= size or (np.diff(positions) <= 0).any()):
        raise ValueError("positions out of order or out of range")
    keep = torch.full((size,), form == "dropped")
    keep[torch.from_numpy(positions)] = form == "kept"
    return keep, end
