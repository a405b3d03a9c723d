"""Converts values to a few bits each and back: ``value = codebook[code] * SCALES[scale]``.

A tensor has a codebook of ``2**bits`` float32 entries, a chunk has a scale byte. The sender chooses how to fit the
codebook and how to round; receivers look up and multiply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

Bits = Literal[1, 2, 4, 8]
Scale = Literal["chunk", "tensor"]
Codebook = Literal["lloyd", "bins"]
Rounding = Literal["nearest", "stochastic"]

STEPS_PER_OCTAVE = 8
# 2**(i / 8) with more digits than float32, so that decoding does not depend on a machine's power function.
_ROOTS = (1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096)
_ROOTS += tuple(root * 1.4142135623730951 for root in _ROOTS)
# Scale bytes: 0 for a chunk of zeros, else 2**((byte - 255) / 8): at most 1, down to 2**-31.75.
SCALES = torch.tensor([0.0] + [math.ldexp(_ROOTS[(step + 2) % 8], (step + 2) // 8 - 32) for step in range(255)])
# Far above any real value, but small enough that computations with decoded values below it can't overflow.
LARGEST = 2.0**100

# Codebooks are fitted to at most this many values of a tensor; more values make no visible difference.
SAMPLE = 2**12
FIT_ROUNDS = 8
SIGMAS = 6


@dataclass(frozen=True)
class Quantizer:
    """A sender's quantization settings.

    Attributes:
        bits: number of bits of a value.
        scale: ``chunk`` sends a scale byte for each chunk; ``tensor`` sends none, and all chunks have the same scale.
        codebook: ``lloyd`` entries have the least squared error; ``bins`` are the means of equal bins that span six
            standard deviations around the mean.
        rounding: to the ``nearest`` entry, or ``stochastic``: to one of the two neighbours, with an unbiased mean.
    """

    bits: Bits
    scale: Scale = "chunk"
    codebook: Codebook = "lloyd"
    rounding: Rounding = "nearest"


@dataclass(frozen=True)
class Quantized:
    """Quantized values of one tensor; leading dimensions, such as tensors and peers, may come first.

    Attributes:
        codebook: float32 [2**bits], each at most ``LARGEST`` in magnitude.
        scales: uint8 [chunks], or [0] if the tensor has one scale.
        codes: uint8 [chunks, k].
    """

    codebook: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


def quantize(groups: Sequence[torch.Tensor], quantizer: Quantizer, seeds: Sequence[Sequence[int]]) -> list[Quantized]:
    """Quantize groups of tensors; each tensor has its own codebook.

    Args:
        groups: finite values, [tensors, chunks, k] each.
        seeds: seeds of stochastic rounding, one for each tensor of each group.
    """
    relatives = [values.to(torch.float64) for values in groups]
    scales = [torch.zeros(len(values), 0, dtype=torch.uint8, device=values.device) for values in groups]
    if quantizer.scale == "chunk":
        scales = [_scale_bytes(values.abs().mean(dim=2)) for values in relatives]
        # A chunk below the smallest scale is sent as zeros; error feedback keeps its values.
        relatives = [
            values / SCALES.to(values)[bytes_.long(), None].clamp(min=float(SCALES[1]))
            for values, bytes_ in zip(relatives, scales, strict=True)
        ]
    # One fit for all codebooks, because starting its many small operations costs more than their work.
    samples = [_sample(*one) for some in zip(relatives, scales, strict=True) for one in zip(*some, strict=True)]
    codebooks = _fit(samples, quantizer).to(groups[0].device).split([len(values) for values in groups])
    codes = [
        _codes(values, codebook.double(), quantizer.rounding, some)
        for values, codebook, some in zip(relatives, codebooks, seeds, strict=True)
    ]
    return [Quantized(*coded) for coded in zip(codebooks, scales, codes, strict=True)]


def dequantize(coded: Quantized, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return finite float32 [..., chunks, k] by a table look-up and one product, so every machine gets the same bits.

    Args:
        out: written to and returned, if given.
    """
    values = coded.codebook.gather(-1, coded.codes.flatten(-2).long()).view(coded.codes.shape)
    if coded.scales.numel():
        scales = SCALES.to(values.device).index_select(0, coded.scales.flatten().int())
        return torch.mul(values, scales.view(coded.scales.shape)[..., None], out=values if out is None else out)
    return values if out is None else out.copy_(values)


def _scale_bytes(mean: torch.Tensor) -> torch.Tensor:
    """Return scale bytes, uint8 [tensors, chunks], for chunks' mean magnitudes relative to the tensor's largest."""
    octaves = torch.log2(mean / mean.amax(dim=1, keepdim=True))
    # 0 / 0 if all chunks are zeros.
    return (255 + octaves * STEPS_PER_OCTAVE).round().nan_to_num(nan=0, neginf=0).clamp(min=0).to(torch.uint8)


def _codes(relative: torch.Tensor, codebook: torch.Tensor, rounding: Rounding, seeds: Sequence[int]) -> torch.Tensor:
    """Return the index of the codebook entry for each value, uint8 [tensors, chunks, k].

    Args:
        relative: values divided by their chunk's scale, float64 [tensors, chunks, k].
        codebook: ascending, float64 [tensors, 2**bits].
    """
    flat = relative.flatten(1)
    if rounding == "nearest":
        return torch.searchsorted(_middles(codebook), flat).to(torch.uint8).view(relative.shape)
    above = torch.searchsorted(codebook, flat).clamp(1, codebook.shape[1] - 1)
    low, high = codebook.gather(1, above - 1), codebook.gather(1, above)
    # On the CPU, because a GPU's generator gives other numbers.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    chance = torch.stack([torch.rand(flat.shape[1], dtype=torch.float64, generator=one) for one in generators])
    upwards = chance.to(relative.device) * (high - low) < flat - low
    return (above - 1 + upwards).to(torch.uint8).view(relative.shape)


def _fit(samples: list[torch.Tensor], quantizer: Quantizer) -> torch.Tensor:
    """Fit ascending codebooks, float32 [tensors, 2**bits] on the CPU, to the samples from ``_sample``."""
    # Infinite padding is above all edges, so it counts in no bin.
    ordered = _Samples.of(pad_sequence(samples, batch_first=True, padding_value=math.inf))
    fit = _lloyd if quantizer.codebook == "lloyd" else _bin_means
    levels = fit(ordered, 2**quantizer.bits)
    return levels.clip(-LARGEST, LARGEST).float()


def _sample(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Sample at most ``SAMPLE`` values of one tensor's [chunks, k], ascending, on the CPU; a single zero if none exist.

    Chunks whose scale is 0 do not count.
    """
    if not scales.all():
        values = values[scales > 0]
    if not values.numel():
        return torch.zeros(1, dtype=values.dtype)
    stride = math.ceil(values.numel() / SAMPLE)
    while math.gcd(stride, values.shape[1]) > 1:  # so that every entry of a chunk can be sampled
        stride += 1
    # NumPy takes a third of the time of torch's sort.
    return torch.from_numpy(np.sort(values.reshape(-1)[::stride].cpu().numpy()))


class _Samples(NamedTuple):
    """Sorted samples of several tensors, with their running sums.

    Attributes:
        ordered: [tensors, samples], ascending in each row, infinite from ``counts`` on.
        running: sums of a row's first 0, 1, ... samples, [tensors, samples + 1].
        counts: samples of each row, [tensors, 1].
    """

    ordered: torch.Tensor
    running: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, ordered: torch.Tensor) -> "_Samples":
        counted = ordered.isfinite()
        running = pad(ordered.where(counted, 0).cumsum(dim=1), (1, 0))
        return cls(ordered, running, counted.sum(dim=1, keepdim=True))

    def means_between(self, edges: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Return the means of the samples between neighbouring edges; ``otherwise`` for intervals without samples.

        Args:
            edges: [tensors, count - 1]; the outermost bins are open.
            otherwise: [tensors, count].
        """
        cuts = pad(torch.searchsorted(self.ordered, edges), (1, 0))
        cuts = torch.cat([cuts, self.counts], dim=1)
        sums, counts = self.running.gather(1, cuts).diff(dim=1), cuts.diff(dim=1)
        return torch.where(counts > 0, sums / counts, otherwise)


def _lloyd(samples: _Samples, count: int) -> torch.Tensor:
    """Return levels with least squared error, [tensors, count]: each is the mean of the samples nearest to it.

    Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28 (1982).
    """
    # Start halfway between levels of equal counts and levels of equal distances, from which few rounds are enough.
    ordered, _, counts = samples
    middles = (torch.arange(count, dtype=ordered.dtype, device=ordered.device) + 0.5) / count
    first, last = ordered[:, :1], ordered.gather(1, counts - 1)
    levels = (ordered.gather(1, (middles * counts).long()) + first + middles * (last - first)) / 2
    for _ in range(FIT_ROUNDS):
        levels = samples.means_between(_middles(levels), levels)
    return levels


def _bin_means(samples: _Samples, count: int) -> torch.Tensor:
    """Return the means of ``count`` equal bins; the bin of x is ``round((x - mean) / width) + count / 2``.

    The outermost bins are open.
    """
    ordered, running, counts = samples
    middle = running.gather(1, counts) / counts
    squares = (ordered - middle).where(ordered.isfinite(), 0).square().sum(dim=1, keepdim=True)
    width = SIGMAS * (squares / counts).sqrt() / count
    centres = middle + width * (torch.arange(count, device=ordered.device) - count / 2)
    return samples.means_between(_middles(centres), centres)


def _middles(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:, 1:] + levels[:, :-1]) / 2
