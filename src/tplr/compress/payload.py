"""A whole update ↔ bytes: the trust boundary. What ``parse`` returns is safe to apply, whoever sent it.

There is one spelling of everything: padding is zero and headers are compared, not interpreted. So no JSON of a peer
is ever parsed, and nothing is allocated that the spec does not foresee.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tplr.compress import bits as packing
from tplr.compress import elias_fano
from tplr.compress.batches import Batch
from tplr.compress.batches import batches as alike
from tplr.compress.layout import PayloadSpec, TensorPlace
from tplr.compress.quantize import LARGEST, Quantized, dequantize, quantize
from tplr.errors import PayloadError
from tplr.seeds import rounding_seed

# Of one tensor: indices into a chunk's entries, int64 [chunks, k], ascending; values, float32 [chunks, k].
Coefficients = tuple[torch.Tensor, torch.Tensor]

# As many entries are decoded at a time, or one peer's: more take memory and no less time.
ENTRIES_AT_ONCE = 2**18

_METADATA = re.compile(rb'"window":"([0-9]{16})","uid":"([0-9]{5})","pages":"([0-9a-f]{64})","batches":"([0-9]{10})"\}')


@dataclass(frozen=True, kw_only=True)
class Update:
    """One peer's valid update of a window; it stays packed, and decodes one tensor at a time.

    Attributes:
        pages_digest: SHA-256 of the pages trained on, as the sender says.
        batches: how many batches the gradient is the mean of, as the sender says.
        body: the whole object.
    """

    spec: PayloadSpec = field(repr=False)
    window: int
    uid: int
    pages_digest: str
    batches: int
    body: bytes = field(repr=False)

    def coefficients(self, name: str, device: torch.device | str = "cpu") -> Coefficients:
        """Indices and values of one tensor, on ``device``; finite, and the same bits everywhere.

        Raises:
            KeyError: no such tensor.
        """
        indices, values = decode_all([self], [self.spec.tensors[name]], device)
        return indices[0], values[0]


def decode_all(
    updates: Sequence[Update], places: Sequence[TensorPlace], device: torch.device | str = "cpu"
) -> Coefficients:
    """``coefficients`` of updates of one spec, side by side: [peers, chunks, k] each.

    In memory, what peers sent of a chunk lies together, as it is wanted where they are added up.

    Args:
        places: of tensors of one shape; their chunks follow each other.
    """
    indices, values = _room(len(updates), places, torch.device(device))
    at_once = max(1, ENTRIES_AT_ONCE // values[0].numel())
    for start in range(0, len(updates), at_once):
        some = slice(start, start + at_once)
        bodies = [update.body for update in updates[some]]
        _decode(bodies, updates[0].spec, places, (indices[some], values[some]), checked=True)
    return indices.flatten(1, 2), values.flatten(1, 2)


def build(
    coefficients: Mapping[str, Coefficients],
    spec: PayloadSpec,
    *,
    window: int,
    uid: int,
    pages_digest: str,
    batches: int,
) -> bytes:
    """Quantize and pack an update: ``spec.expected_size`` bytes. Indices of dense tensors are not looked at.

    Raises:
        ValueError: tensors or metadata are not as the spec wants them, or a value is not finite.
    """
    prologue = spec.prologue(window=window, uid=uid, pages_digest=pages_digest, batches=batches)
    if not _METADATA.fullmatch(prologue, 8 + len(spec.head), len(prologue) - len(spec.tail)):
        raise ValueError(
            f"window {window}, uid {uid}, pages_digest {pages_digest!r}, batches {batches}: expected numbers of "
            "at most 16, 5 and 10 digits, not negative, and a digest of 64 characters of 0-9a-f"
        )
    if coefficients.keys() != spec.tensors.keys():
        raise ValueError(f"tensors {sorted(coefficients.keys() ^ spec.tensors.keys())} are missing or unknown")
    body = bytearray(prologue.ljust(spec.expected_size, b"\0"))
    device = next(iter(coefficients.values()))[1].device
    together = list(alike(spec, device))
    values = [_stacked_values(coefficients, batch) for batch in together]
    if spec.quantizer:
        who = [[rounding_seed(window=window, uid=uid, name=place.name) for place in one.places] for one in together]
        sections = [
            {"codebook": one.codebook, "scales": one.scales, "values": packing.pack(one.codes.flatten(1), spec.bits)}
            for one in quantize(values, spec.quantizer, who)
        ]
    else:
        sections = [{"values": some.to(torch.float32)} for some in values]
    for batch, some in zip(together, sections, strict=True):
        if not batch.places[0].dense:
            indices = torch.stack([coefficients[place.name][0] for place in batch.places])
            some["indices"] = elias_fano.encode(indices, batch.grid.entries)
        for section, tensors in some.items():
            for place, tensor in zip(batch.places, tensors.cpu(), strict=True):
                body[getattr(place, section)] = tensor.numpy().tobytes()
    return bytes(body)


def _stacked_values(coefficients: Mapping[str, Coefficients], batch: Batch) -> torch.Tensor:
    """[tensors, chunks, k]; raises ValueError if they are of another shape, or not finite."""
    expected = (batch.places[0].grid.chunks, batch.k)
    for place in batch.places:
        shape = tuple(coefficients[place.name][1].shape)
        if shape != expected:
            raise ValueError(f"{place.name}: values of shape {shape}; expected {expected}")
    values = torch.stack([coefficients[place.name][1] for place in batch.places])
    bounded = (values.abs() <= LARGEST).flatten(1).all(dim=1)
    if not bounded.all():
        name = batch.places[bounded.tolist().index(False)].name
        raise ValueError(f"{name}: values are not finite, or above {LARGEST:g}")
    return values


def parse(body: bytes, spec: PayloadSpec, *, window: int, uid: int) -> Update:
    """Accept a peer's bytes whole, as its update of this window, or refuse them whole.

    Raises:
        PayloadError: they are anything else.
    """
    if len(body) != spec.expected_size:
        raise PayloadError(f"size: {len(body)} bytes, expected {spec.expected_size}")
    pages_digest, batches = _read_prologue(body, spec, window=window, uid=uid)
    for place in spec.tensors.values():
        try:
            _check(body, spec, place)
        except PayloadError as error:
            raise PayloadError(f"{place.name}: {error.reason}") from error
    return Update(spec=spec, window=window, uid=uid, pages_digest=pages_digest, batches=batches, body=body)


def _read_prologue(body: bytes, spec: PayloadSpec, *, window: int, uid: int) -> tuple[str, int]:
    """The pages' digest and the number of batches, once all bytes before the sections are what they must be."""
    stop = spec.data_start
    if int.from_bytes(body[:8], "little") != stop - 8:
        raise PayloadError(f"header: its length is not {stop - 8}")
    head, tail = 8 + len(spec.head), stop - len(spec.tail)
    if body[8:head] != spec.head:
        raise PayloadError(f"header: not that of an update of scheme {spec.outer!r} and layout {spec.layout}")
    found = _METADATA.fullmatch(body[head:tail])
    if not found or body[tail:stop] != spec.tail:
        raise PayloadError("header: metadata or sections are not spelt as they must be")
    if int(found[1]) != window or int(found[2]) != uid:
        raise PayloadError(f"header: window {int(found[1])} of uid {int(found[2])}, expected {window} of {uid}")
    return found[3].decode(), int(found[4])


def _check(body: bytes, spec: PayloadSpec, place: TensorPlace) -> None:
    """Raise unless ``_decode`` gives finite, bounded values at valid indices."""
    numbers = _section([body], [place.codebook if spec.quantizer else place.values], torch.float32)
    # A comparison that NaN fails.
    if not (numbers.abs() <= LARGEST).all():
        raise PayloadError(f"{'codebook' if spec.quantizer else 'values'}: not finite, or out of range")
    _decode([body], spec, [place], _room(1, [place], torch.device("cpu")), checked=False)


def _room(peers: int, places: Sequence[TensorPlace], device: torch.device) -> Coefficients:
    """For coefficients of tensors of one shape: [peers, tensors, chunks, k] each; a chunk's lie together in memory."""
    shape = (len(places), places[0].grid.chunks, peers, places[0].k)
    indices, values = torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device)
    return indices.movedim(2, 0), values.movedim(2, 0)


def _decode(
    bodies: Sequence[bytes], spec: PayloadSpec, places: Sequence[TensorPlace], out: Coefficients, *, checked: bool
) -> None:
    """Write several peers' coefficients of tensors of one shape where there is room for them (``_room``)."""
    indices, values = out
    one, parts = places[0], values.shape[:2]
    sent = _section(bodies, [place.values for place in places], torch.uint8 if spec.quantizer else torch.float32)
    sent = sent.to(values.device)
    if spec.quantizer:
        codes = packing.unpack(sent, spec.bits, one.grid.chunks * one.k).view(values.shape)
        codebooks = _section(bodies, [place.codebook for place in places], torch.float32).to(values.device)
        scales = _section(bodies, [place.scales for place in places]).to(values.device)
        dequantize(Quantized(codebooks.view(*parts, -1), scales.view(*parts, -1), codes), out=values)
    else:
        values.copy_(sent.view(values.shape))
    if one.dense:
        indices.copy_(torch.arange(one.k, device=indices.device))
    else:
        packed = _section(bodies, [place.indices for place in places]).to(indices.device).view(*parts, -1)
        elias_fano.decode(packed, one.grid.chunks, one.grid.entries, one.k, checked=checked, out=indices)


def _section(bodies: Sequence[bytes], where: Sequence[slice], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Parts of one length of several objects: [objects * parts, numbers]; a copy that torch may own."""
    views = [memoryview(body) for body in bodies]
    copied = bytearray().join(view[part] for view in views for part in where)
    flat = torch.frombuffer(copied, dtype=dtype) if copied else torch.zeros(0, dtype=dtype)
    return flat.view(len(bodies) * len(where), -1 if copied else 0)
