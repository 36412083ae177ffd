"""Compressed messages: any method, with its vectors sent as 8-bit codes of a difference that the receiver adds up.

`compressed(method, down, up)` is a method again, so engines, checkpoints, evaluation and nodes treat it as any other.
For each vector v that the inner method sends, both sides hold the same reference r, bit for bit. What is sent is

    c = round((v - r + e) / s),    and both sides compute    v' = r + c s,

with one scale s for each tensor; e is the error feedback of the uplink, and becomes v - r + e - c s. `wire.py` leaves
out codes that are 0 and entropy-codes the rest.

- Downlink. r is what the client received the last time, as it was decoded, so the next difference contains the error of
  this one: e is not needed. Where an entry was not sent, r is what the client uploaded then. Before its first round, r
  is what the server would send before round 1, which follows from the seed.
- Uplink. r is this round's download of the same name, if there is one, so v - r is the local update. What remains of it
  stays on the client as e. The client goes on with v' where it would have kept v, so it keeps what the server has.

References are in records and in client states under `sent.NAME`, the remainders in client states under `rest.NAME`. A
client without samples leaves both as they are, because no server waits for its upload; so does an evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedobp.importance import above
from fedobp.method import (
    Client,
    CohortUpdate,
    InitialState,
    Method,
    Model,
    Program,
    Record,
    RoundContext,
    Sparse,
    Tensors,
)
from fedobp.models import is_statistic
from fedobp.options import Compression
from fedobp.records import mask_unsent, take, unsent
from fedobp.wrapped import Wrapped, first, first_context, last

_LARGEST = 127  # of a code
_SHARE = 1 / 16  # of the entries that `sparse` sends
_SMALLEST = 64  # entries of a vector that is compressed: what is shorter gains nothing
_BLOCK = 4096  # entries with one scale, in a vector that is not a model's
_SCALE, _SENT, _REST = ".scale", "sent.", "rest."
_NOW = "now.sent."  # what a download decodes to: in records, until `aggregate`


def compressed(method: Method, down: Compression, up: Compression) -> Method:
    """Return a method whose messages are compressed."""
    return method if (down, up) == ("none", "none") else Compressed(method, down, up)


def sizes_of(model: Model, vector: Tensor) -> list[int]:
    """Return the lengths of a vector's parts with a scale each: the model's tensors, or blocks of another vector.

    Entries beyond them have a scale of their own, so they arrive as they are: BatchNorm's running statistics, of which
    a rounded variance could become negative.
    """
    size, layout = vector.shape[-1], model.layout
    if size == layout.size:
        return [part for name, part in zip(layout.names, layout.sizes, strict=True) if not is_statistic(name)]
    return [min(_BLOCK, size - at) for at in range(0, size, _BLOCK)]


def quantise(difference: Tensor, sizes: Sequence[int], level: Compression) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of vectors [..., N]. Every entry that is sent is at most half a scale from its code's.

    8bit: the largest entry of a tensor has the code 127. 4bit: a scale is a quarter of a tensor's root mean square, so
    that codes of a normal distribution have an entropy of 4.05 bits, which is what entropy coding spends on them; a
    range of 16 codes would leave most of it to a few large entries. sparse: as 8bit, of the largest sixteenth of all.
    """
    if level == "sparse":
        difference = torch.where(above(difference.abs(), 1 - _SHARE), difference, 0)
    pieces, alone = difference[..., : sum(sizes)].split(list(sizes), dim=-1), difference[..., sum(sizes) :].abs()
    largest = torch.stack([piece.abs().amax(dim=-1) for piece in pieces], dim=-1)
    scale = torch.cat([largest, alone], dim=-1) / _LARGEST
    if level == "4bit":
        square = torch.stack([piece.square().mean(dim=-1) for piece in pieces], dim=-1)
        scale = torch.maximum(scale, torch.cat([square.sqrt() / 4, torch.zeros_like(alone)], dim=-1))
    steps = _spread(torch.where(scale > 0, scale, 1), sizes)
    return (difference / steps).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


def _spread(scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each part's scale for all of its entries."""
    scales = scale[..., : len(sizes)].split(1, dim=-1)
    shared = [one.expand(*scale.shape[:-1], size) for one, size in zip(scales, sizes, strict=True)]
    return torch.cat([*shared, scale[..., len(sizes) :]], dim=-1)


def dequantise(codes: Tensor, scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the differences that codes stand for. Product and sum are apart: a fused one would round differently."""
    return codes.to(scale.dtype) * _spread(scale, sizes)


def _values(value: Tensor | Sparse) -> Tensor:
    return value.values if isinstance(value, Sparse) else value


def _with(value: Tensor | Sparse, values: Tensor) -> Tensor | Sparse:
    """Return other values in the form of `value`: whole, or with its mask."""
    return Sparse(torch.where(value.keep, values, unsent(values)), value.keep) if isinstance(value, Sparse) else values


def _compressible(value: Tensor | Sparse) -> bool:
    """Say whether one client's value is compressed: a vector of floats that is not short."""
    values = _values(value)
    return values.ndim == 1 and values.is_floating_point() and len(values) >= _SMALLEST


def _named(record: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


def _prefixed(record: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {prefix + name: value for name, value in record.items()}


def _unpack(model: Model, record: Record, reference: Tensors) -> Record:
    """Return a record with the values that its codes stand for."""
    found: Record = {}
    for name, value in record.items():
        scale = record.get(name + _SCALE)
        if isinstance(scale, Tensor) and _values(value).dtype == torch.int8:
            change = dequantise(_values(value), scale, sizes_of(model, _values(value)))
            base = reference.get(name)
            found[name] = _with(value, change if base is None or base.shape != change.shape else base + change)
        elif not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in record):
            found[name] = value
    return found


def _received(download: Record, reference: Tensors) -> Tensors:
    """Return a download's vectors that have a reference; NaN where an entry is not sent."""
    return {name: _values(value) for name, value in mask_unsent(download).items() if name in reference}


def _filled(received: Tensors, reference: Tensors) -> Tensors:
    """Return received vectors with the reference's values where an entry is not sent."""
    return {name: torch.where(value.isnan(), reference[name], value) for name, value in received.items()}


def _next(reference: Tensors, received: Tensors, upload: Record, trained: Tensor) -> Tensors:
    """Return the references after a round: what was received, and where an entry was not sent, what was uploaded."""
    after = {**reference, **_filled(received, reference)}
    for name, value in received.items():
        sent = upload.get(name, after[name])
        sent = sent.fill(after[name]) if isinstance(sent, Sparse) else sent
        if sent.shape == value.shape:
            after[name] = torch.where(value.isnan(), sent, value)
    return {name: torch.where(trained, after[name], old) for name, old in reference.items()}


@dataclass(frozen=True)
class Compressed(Wrapped):
    """A method whose messages are compressed."""

    down: Compression
    up: Compression

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Add the references, which are what the server would send before round 1, and remainders of 0.

        What a method sends or uploads in other rounds only is not compressed.
        """
        server, record, state = self.inner.init(model, theta, seed)
        ctx = first_context(model, seed)
        cohort, _ = self.inner.download(ctx, server, {name: value[None] for name, value in record.items()})
        download = take(cohort, 0)
        upload = self.inner.expected_upload(ctx, download, state) if self.up != "none" else {}
        sent = {name: _values(value).clone() for name, value in download.items() if _compressible(value)}
        rest = {name: torch.zeros_like(_values(value)) for name, value in upload.items() if _compressible(value)}
        references = _prefixed(sent, _SENT)
        return InitialState(server, {**record, **references}, {**state, **references, **_prefixed(rest, _REST)})

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """Send codes of the differences from the references."""
        reference = _named(records, _SENT)
        own = {name: value for name, value in records.items() if not name.startswith(_SENT)}
        download, own = self.inner.download(ctx, server, own)
        message = download
        if self.down != "none":
            message = {}
            for name, value in download.items():
                if name not in reference:
                    message[name] = value
                    continue
                difference = _values(value) - reference[name]
                if isinstance(value, Sparse):
                    difference = torch.where(value.keep, difference, 0)
                codes, scale = quantise(difference, sizes_of(ctx.model, difference), self.down)
                message |= {name: _with(value, codes), name + _SCALE: scale}
        received = _received(_unpack(ctx.model, message, reference), reference)
        return message, {**own, **_prefixed(reference, _SENT), **_prefixed(received, _NOW)}

    def client_update(self, ctx: RoundContext) -> Program:
        """Decode, do what the inner method does, encode.

        `_encode` finds what the client keeps of its upload only among values of the same call, so it is joined with the
        inner method's last functions.
        """
        return last(first(self._decode, self.inner.client_update(ctx)), self._encode)

    def personalize(self, ctx: RoundContext) -> Program:
        """Decode, and do what the inner method does."""
        return first(self._decode, self.inner.personalize(ctx))

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """Decode the uploads, and do what the inner method does; then set the next references."""
        received, reference = _named(records, _NOW), _named(records, _SENT)
        own = {name: value for name, value in records.items() if not name.startswith((_SENT, _NOW))}
        upload = _unpack(ctx.model, update.upload, _filled(received, reference))
        server, own = self.inner.aggregate(ctx, server, own, update._replace(upload=upload))
        return server, {**own, **_prefixed(_next(reference, received, upload, update.n[:, None] > 0), _SENT)}

    def _decode(self, model: Model, client: Client) -> Client:
        """Replace codes by the values that they stand for."""
        return replace(client, download=_unpack(model, client.download, _named(client.state, _SENT)))

    def _encode(self, model: Model, client: Client) -> Client:
        """Upload codes, keep what remains, and go on with the values that the server will have."""
        reference, rest = _named(client.state, _SENT), _named(client.state, _REST)
        received, trained = _received(client.download, reference), client.data["n"] > 0
        bases = _filled(received, reference)
        upload: Record = {}
        decoded: Record = {}
        for name, value in client.upload.items():
            if name not in rest:
                upload[name] = decoded[name] = value
                continue
            before, base, level = rest[name], bases.get(name), self.up
            if base is None or base.shape != before.shape:
                # Of a whole vector, the largest entries are not those that matter: it is sent in full.
                base, level = torch.zeros_like(before), "8bit" if self.up == "sparse" else self.up
            difference = _values(value) - base + before
            if isinstance(value, Sparse):
                difference = torch.where(value.keep, difference, 0)
            sizes = sizes_of(model, difference)
            codes, scale = quantise(difference, sizes, level)
            change = dequantise(codes, scale, sizes)
            remains = difference - change
            if isinstance(value, Sparse):
                remains = torch.where(value.keep, remains, before)
            rest[name] = torch.where(trained, remains, before)
            decoded[name] = _with(value, base + change)
            upload |= {name: _with(value, codes), name + _SCALE: scale}
            client = _adopt(client, value, base + change)
        after = _next(reference, received, decoded, trained)
        client = client.remember(**_prefixed(after, _SENT), **_prefixed(rest, _REST))
        return replace(client, upload=upload)


def _adopt(client: Client, value: Tensor | Sparse, decoded: Tensor) -> Client:
    """Replace an uploaded vector by its decoded values wherever the client keeps it: in its state, or as its model."""
    raw = _values(value)
    decoded = torch.where(value.keep, decoded, raw) if isinstance(value, Sparse) else decoded
    state = {name: decoded if held is raw else held for name, held in client.state.items()}
    scratch = {name: decoded if held is raw else held for name, held in client.scratch.items()}
    return replace(client, state=state, scratch=scratch)
