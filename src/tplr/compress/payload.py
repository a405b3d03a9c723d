"""Converts whole updates to bytes and back. This is the trust boundary: the result of ``parse`` is safe to apply.

Every update has exactly one encoding: padding is zero, and headers are compared, not interpreted. No JSON of a peer is
parsed, and the spec determines all memory that is allocated.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from tplr.compress.bits import pack, pick, unpack
from tplr.compress.layout import FORMAT, PayloadSpec, TensorSpec, index_code
from tplr.compress.quantize import LARGEST, SCALES, Quantized, dequantize, quantize
from tplr.compress.tensor_groups import TensorGroup, tensor_groups
from tplr.errors import EmptyUpdate, PayloadError
from tplr.seeds import rounding_seed

# One tensor's indices into a chunk's entries, int64 [chunks, k], ascending, or in ascending
# groups (``TensorSpec.grouped``), and its values, float32 [chunks, k].
Coefficients = tuple[torch.Tensor, torch.Tensor]

# Maximum number of entries decoded at a time, or one peer's if it has more, by device. On a CPU larger blocks only take
# more memory; on a GPU starting an operation costs the most.
ENTRIES_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}

_METADATA = re.compile(rb'"window":"([0-9]{16})","uid":"([0-9]{5})","pages":"([0-9a-f]{64})","batches":"([0-9]{10})"\}')


@dataclass(frozen=True, kw_only=True)
class Update:
    """One peer's valid update of a window. It stays packed, and decodes one tensor at a time.

    Attributes:
        pages_digest: SHA-256 of the pages trained on, as claimed by the sender.
        batches: number of batches in the mean gradient, as claimed by the sender.
        body: the whole object.
    """

    spec: PayloadSpec = field(repr=False)
    window: int
    uid: int
    pages_digest: str
    batches: int
    body: bytes = field(repr=False)
    _norms: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def sha256(self) -> str:
        """Hash of the whole object, hex."""
        return hashlib.sha256(self.body).hexdigest()

    def coefficients(self, name: str, device: torch.device | str = "cpu") -> Coefficients:
        """Return the finite coefficients of one tensor, on ``device``; every machine gets the same bits.

        Raises:
            KeyError: no such tensor.
        """
        indices, values = decode_all([self], [self.spec.tensors[name]], device)
        return indices[0], values[0]

    def norm(self, name: str) -> float:
        """Return the L2 norm of all values of one tensor, up to the rounding of its values; decodes no index.

        A validator needs it for each own-pages test of a window, so it is computed once.
        """
        if name not in self._norms:
            self._norms[name] = _tensor_norm(self, self.spec.tensors[name])
        return self._norms[name]


def decode_all(
    updates: Sequence[Update], tensors: Sequence[TensorSpec], device: torch.device | str = "cpu"
) -> Coefficients:
    """Decode the coefficients of several updates of one spec: [peers, chunks, k] each.

    The entries of one chunk are adjacent in memory, peer after peer, in the order in which a sum over peers reads them.

    Args:
        tensors: tensors with one shape; their chunks are concatenated.
    """
    indices, values = _empty_coefficients(len(updates), tensors, torch.device(device))
    at_once = max(1, ENTRIES_AT_ONCE[values.device.type] // values[0].numel())
    for start in range(0, len(updates), at_once):
        some = slice(start, start + at_once)
        bodies = [update.body for update in updates[some]]
        _decode(bodies, updates[0].spec, tensors, (indices[some], values[some]), checked=True)
    return indices.flatten(1, 2), values.flatten(1, 2)


def decode_chunks(updates: Sequence[Update], tensor: TensorSpec, chunks: np.ndarray) -> Coefficients:
    """Decode the coefficients of some chunks of one tensor on the CPU, without the others: [peers, chosen, k] each.

    Args:
        chunks: numbers of the chunks, int64 [chosen].
    """
    if np.array_equal(chunks, np.arange(tensor.grid.chunks)):  # tables decode all chunks faster than single bits
        indices, values = decode_all(updates, [tensor])
        return indices.contiguous(), values.contiguous()
    spec, shape = updates[0].spec, (len(updates), len(chunks), tensor.k)
    bodies = [np.frombuffer(update.body, dtype=np.uint8) for update in updates]
    places = tensor.k * chunks[:, None] + np.arange(tensor.k)
    if spec.quantizer:
        codes = np.stack([pick(body[tensor.values], spec.bits, places) for body in bodies])
        chosen = chunks if spec.quantizer.scale == "chunk" else chunks[:0]
        scales = np.stack([body[tensor.scales][chosen] for body in bodies])
        codebooks = np.stack([body[tensor.codebook] for body in bodies]).view(np.float32)
        values = dequantize(Quantized(*map(torch.from_numpy, (codebooks, scales, codes))))
    else:
        sent = np.stack([body[tensor.values] for body in bodies]).view(np.float32)
        values = torch.from_numpy(sent[:, places])
    if tensor.dense:
        return torch.arange(tensor.k).expand(shape), values
    grid = tensor.grid
    code = index_code(grouped=tensor.grouped)
    where = code.row_bits(chunks, grid.chunks, grid.entries, tensor.k)
    all_bits = torch.from_numpy(np.stack([pick(body[tensor.indices], 1, where) for body in bodies]))
    return code.decode_bits(all_bits, len(chunks), grid.entries, tensor.k), values


def _tensor_norm(update: Update, tensor: TensorSpec) -> float:
    body, spec = np.frombuffer(update.body, dtype=np.uint8), update.spec
    if not spec.quantizer:
        return float(np.linalg.norm(body[tensor.values].view(np.float32).astype(np.float64)))
    squares = np.square(body[tensor.codebook].view(np.float32), dtype=np.float64)
    packed, per_byte = body[tensor.values], 8 // spec.bits
    if tensor.k % per_byte:
        of_codes = squares[pick(packed, spec.bits, np.arange(tensor.grid.chunks * tensor.k))]
    else:  # a byte's codes belong to one chunk, so one look-up serves all of them
        codes = pick(np.arange(256, dtype=np.uint8), spec.bits, np.arange(256 * per_byte))
        of_codes = squares[codes].reshape(256, per_byte).sum(axis=1)[packed]
    of_codes = of_codes.reshape(tensor.grid.chunks, -1)
    of_chunks = of_codes @ np.ones(of_codes.shape[1])  # a sum over a few columns is slow
    if spec.quantizer.scale == "chunk":
        of_chunks *= np.square(SCALES.numpy(), dtype=np.float64)[body[tensor.scales]]
    return float(np.sqrt(of_chunks.sum()))


def build(
    coefficients: Mapping[str, Coefficients],
    spec: PayloadSpec,
    *,
    window: int,
    uid: int,
    pages_digest: str,
    batches: int,
) -> bytes:
    """Quantize and pack an update: ``spec.expected_size`` bytes. Indices of dense tensors are not read.

    Raises:
        ValueError: tensors, indices or metadata do not fit the spec, or a value is not finite.
    """
    if coefficients.keys() != spec.tensors.keys():
        raise ValueError(f"tensors {sorted(coefficients.keys() ^ spec.tensors.keys())} are missing or unknown")
    body = empty_body(spec, window=window, uid=uid, pages_digest=pages_digest, batches=batches)
    fill(body, coefficients, spec, window=window, uid=uid)
    return bytes(body)


def empty_body(spec: PayloadSpec, *, window: int, uid: int, pages_digest: str, batches: int) -> bytearray:
    """Return an update with its header and empty tensors. Raises ValueError if metadata do not fit."""
    prologue = spec.prologue(window=window, uid=uid, pages_digest=pages_digest, batches=batches)
    if not _METADATA.fullmatch(prologue, 8 + len(spec.head), len(prologue) - len(spec.tail)):
        raise ValueError(
            f"window {window}, uid {uid}, pages_digest {pages_digest!r}, batches {batches}: expected numbers of "
            "at most 16, 5 and 10 digits, not negative, and a digest of 64 characters of 0-9a-f"
        )
    return bytearray(prologue.ljust(spec.expected_size, b"\0"))


def fill(
    body: bytearray, coefficients: Mapping[str, Coefficients], spec: PayloadSpec, *, window: int, uid: int
) -> None:
    """Quantize and pack some tensors into their sections of ``body``. Raises ValueError as ``build``."""
    if not coefficients:
        return
    device = next(iter(coefficients.values()))[1].device
    groups = list(tensor_groups(spec, device, coefficients))
    values = [_stacked_values(coefficients, group) for group in groups]
    if spec.quantizer:
        seeds = [[rounding_seed(window=window, uid=uid, name=one.name) for one in group.tensors] for group in groups]
        sections = [
            {"codebook": one.codebook, "scales": one.scales, "values": pack(one.codes.flatten(1), spec.bits)}
            for one in quantize(values, spec.quantizer, seeds)
        ]
    else:
        sections = [{"values": some.to(torch.float32)} for some in values]
    for group, of_group in zip(groups, sections, strict=True):
        if not group.tensors[0].dense:
            indices = torch.stack([coefficients[tensor.name][0] for tensor in group.tensors])
            of_group["indices"] = index_code(grouped=group.grouped).encode(indices, group.grid.entries)
        for section, data in of_group.items():
            for tensor, of_tensor in zip(group.tensors, data.cpu(), strict=True):
                body[getattr(tensor, section)] = of_tensor.numpy().tobytes()


def _stacked_values(coefficients: Mapping[str, Coefficients], group: TensorGroup) -> torch.Tensor:
    """Stack the values of a group's tensors, [tensors, chunks, k]. Raises ValueError for a wrong shape or value."""
    expected = (group.tensors[0].grid.chunks, group.k)
    for tensor in group.tensors:
        shape = tuple(coefficients[tensor.name][1].shape)
        if shape != expected:
            raise ValueError(f"{tensor.name}: values of shape {shape}; expected {expected}")
    values = torch.stack([coefficients[tensor.name][1] for tensor in group.tensors])
    bounded = (values.abs() <= LARGEST).flatten(1).all(dim=1)
    if not bounded.all():
        name = group.tensors[bounded.tolist().index(False)].name
        raise ValueError(f"{name}: values are not finite, or above {LARGEST:g}")
    return values


def parse(body: bytes, spec: PayloadSpec, *, window: int, uid: int) -> Update:
    """Validate a peer's bytes as its update of this window.

    Raises:
        EmptyUpdate: every value is zero.
        PayloadError: the bytes are not a valid update.
    """
    if len(body) != spec.expected_size:
        raise PayloadError(f"size: {len(body)} bytes, expected {spec.expected_size}")
    pages_digest, batches = read_prologue(body, spec, window=window, uid=uid)
    empty = True
    for tensor in spec.tensors.values():
        try:
            values = _check(body, spec, tensor)
        except PayloadError as error:
            raise PayloadError(f"{tensor.name}: {error.reason}") from error
        empty = empty and not values.any()
    if empty:
        raise EmptyUpdate("every value is zero")
    return Update(spec=spec, window=window, uid=uid, pages_digest=pages_digest, batches=batches, body=body)


def read_prologue(body: bytes, spec: PayloadSpec, *, window: int, uid: int) -> tuple[str, int]:
    """Return the pages' digest and the number of batches from the first ``spec.data_start`` bytes of an update.

    Raises:
        PayloadError: the header is not the expected one.
    """
    stop = spec.data_start
    if int.from_bytes(body[:8], "little") != stop - 8:
        raise PayloadError(f"header: its length is not {stop - 8}")
    head, tail = 8 + len(spec.head), stop - len(spec.tail)
    if body[8:head] != spec.head:
        raise PayloadError(f"header: not that of an update of format {FORMAT} and layout {spec.layout}")
    found = _METADATA.fullmatch(body[head:tail])
    if not found or body[tail:stop] != spec.tail:
        raise PayloadError("header: metadata or sections are not spelt as they must be")
    if int(found[1]) != window or int(found[2]) != uid:
        raise PayloadError(f"header: window {int(found[1])} of uid {int(found[2])}, expected {window} of {uid}")
    return found[3].decode(), int(found[4])


def _check(body: bytes, spec: PayloadSpec, tensor: TensorSpec) -> torch.Tensor:
    """Return the tensor's values. Raises PayloadError unless ``_decode`` yields finite values at valid indices."""
    numbers = _read_sections([body], [tensor.codebook if spec.quantizer else tensor.values], torch.float32)
    # NaN fails the comparison.
    if not (numbers.abs() <= LARGEST).all():
        raise PayloadError(f"{'codebook' if spec.quantizer else 'values'}: not finite, or out of range")
    indices, values = _empty_coefficients(1, [tensor], torch.device("cpu"))
    _decode([body], spec, [tensor], (indices, values), checked=False)
    return values


def _empty_coefficients(peers: int, tensors: Sequence[TensorSpec], device: torch.device) -> Coefficients:
    """Allocate coefficients for tensors of one shape, [peers, tensors, chunks, k] each; a chunk's are adjacent."""
    shape = (len(tensors), tensors[0].grid.chunks, peers, tensors[0].k)
    indices, values = torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device)
    return indices.movedim(2, 0), values.movedim(2, 0)


def _decode(
    bodies: Sequence[bytes], spec: PayloadSpec, tensors: Sequence[TensorSpec], out: Coefficients, *, checked: bool
) -> None:
    """Decode several peers' coefficients of tensors of one shape into ``out`` (``_empty_coefficients``)."""
    indices, values = out
    one, leading = tensors[0], values.shape[:2]
    dtype = torch.uint8 if spec.quantizer else torch.float32
    sent = _read_sections(bodies, [tensor.values for tensor in tensors], dtype).to(values.device)
    if spec.quantizer:
        codes = unpack(sent, spec.bits, one.grid.chunks * one.k).view(values.shape)
        codebooks = _read_sections(bodies, [tensor.codebook for tensor in tensors], torch.float32).to(values.device)
        scales = _read_sections(bodies, [tensor.scales for tensor in tensors]).to(values.device)
        dequantize(Quantized(codebooks.view(*leading, -1), scales.view(*leading, -1), codes), out=values)
    else:
        values.copy_(sent.view(values.shape))
    if one.dense:
        indices.copy_(torch.arange(one.k, device=indices.device))
    else:
        packed = _read_sections(bodies, [tensor.indices for tensor in tensors]).to(indices.device).view(*leading, -1)
        index_code(grouped=one.grouped).decode(
            packed, one.grid.chunks, one.grid.entries, one.k, checked=checked, out=indices
        )


def _read_sections(bodies: Sequence[bytes], where: Sequence[slice], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Copy sections of equal length from several objects: [objects * sections, numbers], writable."""
    views = [memoryview(body) for body in bodies]
    copied = bytearray().join(view[section] for view in views for section in where)
    flat = torch.frombuffer(copied, dtype=dtype) if copied else torch.zeros(0, dtype=dtype)
    return flat.view(len(bodies) * len(where), -1 if copied else 0)
