"""The size and format of messages: the one codec that the simulator counts with and real nodes send.

A message is a header (magic, version, length, and JSON that names the fields) followed by the payload: for each field,
the mask of a `Sparse` value in its cheapest form, then the values. A mask is a bitmap, a list of 4-byte positions of
the smaller side, kept or dropped, or run lengths. Fields of 8-bit integers are codes of a compressed run: of these only
the nonzero ones are sent, with their mask, where that is shorter; and a payload with codes is one zstd frame. Only the
payload is counted as traffic. docs/wire-format.md has the format byte by byte.

Nothing is unpickled. The receiver says which fields it expects, in which shapes: a message that is longer than such a
message can be is refused before it is read, and no more memory is reserved than these shapes need.
"""

import json
import math
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedobp.errors import FedobpError, first_line, short
from fedobp.records import Record, Sparse, shapes_of, take, types_of, unsent
from fedobp.transfer import AsyncCopy, Deferred

VERSION = 2
_MAGIC = b"FOBP"
_START = len(_MAGIC) + 1 + 4  # magic, version, length of the header
_DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST = 8  # bytes of an entry
_CODES = torch.int8  # fields of codes
_SCALE = ".scale"  # NAME.scale are the scales of the codes NAME
_LARGEST_SCALE = 1e30  # so that a code times its scale is finite
_ZSTD_LEVEL = 3

Shapes = Mapping[str, tuple[int, ...]]


def payload_bytes(record: Mapping[str, Tensor | Sparse]) -> int:
    """Return the payload of a whole cohort's messages; every tensor has a leading axis of clients."""
    return Payload(record).bytes()


class Payload:
    """The payload of a cohort's record that a device may still be computing: only `bytes` waits for it.

    Messages with codes are encoded, because the size of a zstd frame is known only then. Others are counted.
    """

    def __init__(self, record: Mapping[str, Tensor | Sparse]) -> None:
        self._encoded = any(_values(value).dtype == _CODES for value in record.values())
        if self._encoded:
            self._copies = {name: [AsyncCopy(part) for part in _parts(value)] for name, value in record.items()}
            return
        whole = [value for value in record.values() if isinstance(value, Tensor)]
        self._whole = sum(value.numel() * value.element_size() for value in whole)
        masked = [value for value in record.values() if isinstance(value, Sparse)]
        self._masked = [Deferred(partial(_sparse_bytes, value.values.element_size()), value.keep) for value in masked]

    def bytes(self) -> int:
        """Wait for the numbers, and return the number of bytes."""
        if not self._encoded:
            return self._whole + sum(size.value() for size in self._masked)
        parts = {name: [copy.value() for copy in copies] for name, copies in self._copies.items()}
        record: Record = {name: Sparse(*found) if len(found) == 2 else found[0] for name, found in parts.items()}
        clients = len(next(iter(parts.values()))[0])
        messages = (encode(take(record, at)) for at in range(clients))
        return sum(len(message) - header_bytes(message) for message in messages)


def _parts(value: Tensor | Sparse) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, Sparse) else (value,)


def _values(value: Tensor | Sparse) -> Tensor:
    return value.values if isinstance(value, Sparse) else value


def _sparse_bytes(each: int, keep: Tensor) -> int:
    """Return the payload of sparse vectors: the kept values of `each` bytes, and each mask in its cheapest form."""
    kept, size = keep.sum(dim=-1), keep.shape[-1]
    shortest = torch.minimum(4 * torch.minimum(kept, size - kept), run_bytes(keep)).clamp(max=math.ceil(size / 8))
    return int((kept * each + shortest).sum())


def run_bytes(keep: Tensor) -> Tensor:
    """Return the bytes of the run lengths of masks [..., N].

    A run of at least 128^k entries takes k + 1 bytes. The first run is of dropped entries: it is empty, and takes a
    byte, if entry 0 is kept. Runs are listed by where they end: few places, unless a mask is as good as random.
    """
    size = keep.shape[-1]
    if not size:
        return torch.zeros(keep.shape[:-1], dtype=torch.int64, device=keep.device)
    change = keep[..., 1:] != keep[..., :-1]
    ends = torch.cat([change, torch.ones_like(keep[..., :1])], dim=-1)
    places = ends.flatten().nonzero().flatten()
    lengths = places.diff(prepend=places.new_tensor([-1]))
    used = torch.ones_like(places)
    for length in (128**power for power in range(1, 5) if 128**power <= size):
        used += lengths >= length
    total = used.new_zeros(keep.shape[:-1].numel()).index_add_(0, places // size, used)
    return total.view(keep.shape[:-1]) + keep[..., 0]


def encode(record: Record) -> bytes:
    """Return one client's message (no leading axis)."""
    fields: list[dict[str, Any]] = []
    payload: list[bytes] = []
    for name, value in record.items():
        values = _values(value)
        entry: dict[str, Any] = {"name": name, "dtype": _NAMES[values.dtype], "shape": list(values.shape)}
        if isinstance(value, Sparse):
            entry["mask"], mask = _encode_mask(value.keep.cpu().numpy())
            payload.append(mask)
            values = values[value.keep]
        sent = values.contiguous().cpu().numpy()
        if values.dtype == _CODES:
            form, mask = _encode_mask(sent.ravel() != 0)
            nonzero = sent[sent != 0]
            if len(mask) + len(nonzero) < sent.size:
                entry["nonzero"], sent = form, nonzero
                payload.append(mask)
        fields.append(entry)
        payload.append(sent.tobytes())
    header: dict[str, Any] = {"fields": fields}
    body = b"".join(payload)
    if any(entry["dtype"] == _NAMES[_CODES] for entry in fields):
        packed = _compress(body)
        if len(packed) < len(body):
            header["zstd"], body = len(body), packed
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_MAGIC, bytes([VERSION]), struct.pack("<I", len(text)), text, body])


def _encode_mask(keep: NDArray[np.bool_]) -> tuple[list[Any], bytes]:
    """Return ([form, bytes], bytes) of a mask, in the cheapest of its four forms."""
    kept, size = int(keep.sum()), len(keep)
    form, listed = ("kept", kept) if kept <= size - kept else ("dropped", size - kept)
    sizes = {form: 4 * listed, "bitmap": math.ceil(size / 8), "runs": int(run_bytes(torch.from_numpy(keep)))}
    form = min(sizes, key=lambda form: sizes[form])
    if form == "bitmap":
        mask = np.packbits(keep).tobytes()
    elif form == "runs":
        mask = _encode_runs(keep)
    else:
        mask = np.flatnonzero(keep == (form == "kept")).astype("<u4").tobytes()
    return [form, len(mask)], mask


def _encode_runs(keep: NDArray[np.bool_]) -> bytes:
    """Return the lengths of the runs of dropped and kept entries, in turn, as varints: 7 bits a byte, low bits first.

    The first run is of dropped entries, and may be empty.
    """
    ends = np.flatnonzero(np.diff(keep, prepend=False, append=~keep[-1:]))
    runs = np.diff(ends, prepend=0)
    digits = np.stack([runs >> shift for shift in (0, 7, 14, 21, 28)], axis=1)
    used = digits > 0
    used[:, 0] = True
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    found: bytes = ((digits & 127) | (more << 7)).astype(np.uint8)[used].tobytes()
    return found


def _compress(payload: bytes) -> bytes:
    import zstandard  # here: only runs with compression need it

    return bytes(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(payload))


def header_bytes(message: bytes) -> int:
    """Return how much of a message is header, which traffic does not count."""
    if len(message) < _START or not message.startswith(_MAGIC):
        raise FedobpError("a message does not start as one of fedobp's: sender and receiver must run the same version")
    if message[len(_MAGIC)] != VERSION:
        raise FedobpError(
            f"a message is of format version {message[len(_MAGIC)]}, and this side reads {VERSION}: sender and "
            "receiver must run the same version"
        )
    return _START + int(struct.unpack_from("<I", message, len(_MAGIC) + 1)[0])


def max_message_bytes(shapes: Shapes) -> int:
    """Return the length that no message with fields of these shapes exceeds, so that a longer one can be refused."""
    return _START + _max_header(shapes) + _max_payload(shapes)


def _max_header(shapes: Shapes) -> int:
    # In JSON a character takes 12 bytes at most, and a field without its name 100 and its sides.
    return 100 + sum(200 + 12 * len(name) + 24 * len(shape) for name, shape in shapes.items())


def _max_payload(shapes: Shapes) -> int:
    # Of each field the values, and two masks: what is sent, and which codes are not 0.
    return sum(_LARGEST * math.prod(shape) + 2 * math.ceil(math.prod(shape) / 8) for shape in shapes.values())


def decode_expected(message: bytes, expected: Record) -> Record:
    """Return the record of one client's message; names, shapes and types must be those that the receiver expects."""
    record = decode(message, shapes_of(expected))
    if types_of(record) != types_of(expected):
        found, wanted = (short(types_of(one), 200) for one in (record, expected))
        raise FedobpError(f"a message holds {found}, where {wanted} is expected: both sides must use one model")
    return record


def decode(message: bytes, shapes: Shapes) -> Record:
    """Return the record of one client's message; what was not sent is NaN, and 0 in codes.

    The message must hold exactly the values that the receiver expects, in the shapes that it expects, so a sender can
    neither slip in another model nor make the receiver reserve more memory than that.
    """
    if len(message) > max_message_bytes(shapes):
        raise FedobpError(
            f"a message has {len(message):,} bytes, and at most {max_message_bytes(shapes):,} are expected: both sides "
            "must use one model"
        )
    start = header_bytes(message)
    record: Record = {}
    try:
        if start - _START > _max_header(shapes):
            raise ValueError("a header that is too long")
        header = json.loads(message[_START:start])
        fields = header["fields"]
        sent = [(entry["name"], tuple(entry["shape"])) for entry in fields]
        if sorted(sent) != sorted(shapes.items()):
            raise FedobpError(
                f"a message holds {short(sent, 200)}, where {short(list(shapes.items()), 200)} is expected: both sides "
                "must use one model"
            )
        body = memoryview(message)[start:]
        payload = _Reader(_decompress(body, header["zstd"], _max_payload(shapes)) if "zstd" in header else body)
        for entry in fields:
            name, dtype = entry["name"], _DTYPES[entry["dtype"]]
            record[name] = _decode_field(payload, entry, dtype, shapes[name])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise FedobpError(
            f"a message of {len(message):,} bytes is damaged ({first_line(error)}): send it again"
        ) from error
    if payload.left:
        raise FedobpError(f"a message is {payload.left:,} bytes longer than its header says: send it again")
    _check_values(record)
    return record


def _decode_field(payload: "_Reader", entry: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    count, keep = math.prod(shape), None
    if "mask" in entry:
        if len(shape) != 1 or not (dtype.is_floating_point or dtype == _CODES):
            raise ValueError("a mask on what is no vector of floats or codes")
        keep = torch.from_numpy(_decode_mask(payload, entry["mask"], count))
        count = int(keep.sum())
    if "nonzero" in entry:
        if dtype != _CODES:
            raise ValueError("left out zeros of what are no codes")
        nonzero = torch.from_numpy(_decode_mask(payload, entry["nonzero"], count))
        values = torch.zeros(count, dtype=dtype).masked_scatter(nonzero, payload.values(dtype, int(nonzero.sum())))
    else:
        values = payload.values(dtype, count)
    if keep is None:
        return values.reshape(shape)
    return Sparse(unsent(values).expand(shape).masked_scatter(keep, values), keep)


def _check_values(record: Record) -> None:
    """Refuse values that are not finite, and codes and scales that no sender makes."""
    for name, value in record.items():
        found = value.values[value.keep] if isinstance(value, Sparse) else value
        if not torch.isfinite(found).all():
            raise FedobpError(
                f"a message holds NaN or infinite values in '{short(name)}': the sender's training diverged"
            )
        if found.dtype == _CODES and (found == -128).any():
            raise FedobpError(f"a message holds codes below -127 in '{short(name)}': send it again")
        codes = record.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
        is_scale = codes is not None and _values(codes).dtype == _CODES
        if is_scale and not ((found >= 0) & (found <= _LARGEST_SCALE)).all():
            raise FedobpError(f"a message holds scales below 0 or above {_LARGEST_SCALE:g} in '{name}': send it again")


class _Reader:
    """A payload that is read from the front."""

    def __init__(self, payload: "memoryview | bytes") -> None:
        self._payload, self._at = memoryview(payload), 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def take(self, count: int) -> memoryview:
        if not isinstance(count, int) or not 0 <= count <= self.left:
            raise ValueError("cut short")
        self._at += count
        return self._payload[self._at - count : self._at]

    def values(self, dtype: torch.dtype, count: int) -> Tensor:
        raw = bytearray(self.take(count * dtype.itemsize))
        if dtype == torch.bool and raw.strip(b"\0\1"):
            raise ValueError("a truth value that is neither 0 nor 1")
        return torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _decompress(body: memoryview, size: Any, limit: int) -> bytes:
    """Return the content of a zstd frame, which must be of the size that header and frame say."""
    import zstandard

    if not isinstance(size, int) or not 0 <= size <= limit:
        raise ValueError("a payload of another size")
    try:
        # The frame says its size, too, and as much is allocated.
        if zstandard.get_frame_parameters(body).content_size != size:
            raise ValueError("a zstd frame of another size")
        content = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    return bytes(content)


def _decode_mask(payload: _Reader, about: Any, size: int) -> NDArray[np.bool_]:
    form, length = about
    raw = np.frombuffer(payload.take(length), np.uint8)
    if form == "bitmap":
        if length != math.ceil(size / 8):
            raise ValueError("a bitmap of another size")
        return np.unpackbits(raw, count=size).astype(np.bool_)
    if form == "runs":
        return _decode_runs(raw, size)
    if form not in ("kept", "dropped") or length % 4:
        raise ValueError(f"mask form {short(about)}")
    positions = raw.view("<u4").astype(np.int64)
    if len(positions) and (positions.max() >= size or (np.diff(positions) <= 0).any()):
        raise ValueError("positions out of order or out of range")
    keep = np.full(size, form == "dropped")
    keep[positions] = form == "kept"
    return keep


def _decode_runs(raw: NDArray[np.uint8], size: int) -> NDArray[np.bool_]:
    last = raw < 128  # of a run's bytes
    ends = np.flatnonzero(last)
    lengths = np.diff(ends, prepend=-1)
    if not len(ends) or not last[-1] or lengths.max() > 5:
        raise ValueError("run lengths that do not end")
    starts = ends - lengths + 1
    runs = np.zeros(len(ends), np.int64)
    for digit in range(int(lengths.max())):
        has = lengths > digit
        runs[has] |= (raw[starts[has] + digit] & 127).astype(np.int64) << (7 * digit)
    # Each is checked before the sum: together they must not reserve more memory than the mask.
    if (runs[1:] < 1).any() or (runs > size).any() or runs.sum() != size:
        raise ValueError("run lengths of another mask")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)
