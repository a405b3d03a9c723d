"""A whole update ↔ bytes: the trust boundary. What ``parse`` returns is safe to apply, whoever sent it.

There is one spelling of everything: padding is zero and headers are compared, not interpreted. So no JSON of a peer
is ever parsed, and nothing is allocated that the spec does not foresee.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tplr.compress import bits as packing
from tplr.compress import elias_fano
from tplr.compress.layout import PayloadSpec, TensorPlace
from tplr.compress.quantize import LARGEST, Quantized, dequantize, quantize
from tplr.errors import PayloadError

# Of one tensor: indices into a chunk's entries, int64 [chunks, k], ascending; values, float32 [chunks, k].
Coefficients = tuple[torch.Tensor, torch.Tensor]

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
        return _decode(self.body, self.spec, self.spec.tensors[name], torch.device(device))


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
    for name, place in spec.tensors.items():
        indices, values = coefficients[name]
        if values.shape != (place.grid.chunks, place.k) or not (values.abs() <= LARGEST).all():
            raise ValueError(
                f"{name}: values of shape {tuple(values.shape)}; expected finite ones of {(place.grid.chunks, place.k)}"
            )
        if spec.bits:
            coded = quantize(values, spec.bits)
            body[place.ladder] = _bytes(coded.ladder)
            body[place.scales] = _bytes(coded.scales)
            body[place.values] = _bytes(packing.pack(coded.codes.view(-1), spec.bits))
        else:
            body[place.values] = _bytes(values.to(torch.float32))
        if not place.dense:
            body[place.indices] = _bytes(elias_fano.encode(indices, place.grid.entries))
    return bytes(body)


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
    # A comparison that NaN fails, whatever the sign.
    numbers = _tensor(body, place.ladder if spec.bits else place.values, torch.float32)
    lowest = 0 if spec.bits else -LARGEST
    if not ((numbers >= lowest) & (numbers <= LARGEST)).all():
        raise PayloadError("ladder out of range" if spec.bits else "a value is not finite or out of range")
    _decode(body, spec, place, torch.device("cpu"))


def _decode(body: bytes, spec: PayloadSpec, place: TensorPlace, device: torch.device) -> Coefficients:
    chunks, k, n = place.grid.chunks, place.k, place.grid.entries
    if spec.bits:
        codes = packing.unpack(_tensor(body, place.values).to(device), spec.bits, chunks * k).view(chunks, k)
        ladder, scales = _tensor(body, place.ladder, torch.float32), _tensor(body, place.scales).to(device)
        values = dequantize(Quantized(ladder, scales, codes), spec.bits)
    else:
        values = _tensor(body, place.values, torch.float32).view(chunks, k).to(device)
    if place.dense:
        return torch.arange(n, device=device).expand(chunks, n), values
    return elias_fano.decode(_tensor(body, place.indices).to(device), chunks, n, k), values


def _tensor(body: bytes, where: slice, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    # bytearray: a copy that torch may own; the section is never larger than the spec says.
    return torch.frombuffer(bytearray(body[where]), dtype=dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().numpy().tobytes()
