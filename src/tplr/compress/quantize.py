"""Values ↔ a few bits each: an entry of the tensor's codebook, times the scale of the chunk.

``value = codebook[code] * SCALES[scale]`` with ``2**bits`` float32 entries a tensor. How the codebook was made and how
a value was rounded to it is the sender's business; receivers look up and multiply.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Bits = Literal[1, 2, 4, 8]
Scale = Literal["chunk", "tensor"]
Codebook = Literal["lloyd", "bins"]
Rounding = Literal["nearest", "stochastic"]

STEPS_PER_OCTAVE = 8
# 2**(i / 8) to more digits than float32 has: no machine's power function takes part in decoding.
_ROOTS = (1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096)
_ROOTS += tuple(root * 1.4142135623730951 for root in _ROOTS)
# Scale bytes: 0 for a chunk of zeros, else 2**((byte - 255) / 8): at most 1, down to 2**-31.75.
SCALES = torch.tensor([0.0] + [math.ldexp(_ROOTS[(step + 2) % 8], (step + 2) // 8 - 32) for step in range(255)])
# Far above any real value; below it nothing that is computed from decoded values can overflow.
LARGEST = 2.0**100

# Codebooks are fitted to at most so many values of a tensor: more change nothing that can be seen.
SAMPLE = 2**12
FIT_ROUNDS = 8
SIGMAS = 6


@dataclass(frozen=True)
class Quantizer:
    """How a sender quantizes.

    Attributes:
        bits: of a value.
        scale: ``chunk`` sends a byte for each chunk's scale, ``tensor`` none: all chunks have the same.
        codebook: ``lloyd`` entries have the least squared error; ``bins`` are the means of equal bins that span six
            standard deviations around the mean.
        rounding: to the ``nearest`` entry, or ``stochastic``: to one of the two around it, so that the mean is right.
    """

    bits: Bits
    scale: Scale = "chunk"
    codebook: Codebook = "lloyd"
    rounding: Rounding = "nearest"


@dataclass(frozen=True)
class Quantized:
    """One tensor's values; a dimension of peers may come first.

    Attributes:
        codebook: float32 [2**bits], each at most ``LARGEST`` in magnitude.
        scales: uint8 [chunks], or [0] where a tensor has one scale.
        codes: uint8 [chunks, k].
    """

    codebook: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


def quantize(values: torch.Tensor, quantizer: Quantizer, seed: int = 0) -> Quantized:
    """Code finite values [chunks, k].

    Args:
        seed: of stochastic rounding.
    """
    relative = values.to(torch.float64)
    scales = torch.zeros(0, dtype=torch.uint8, device=values.device)
    if quantizer.scale == "chunk":
        scales = _scale_bytes(relative.abs().mean(dim=1))
        # A chunk below the smallest scale is sent as zeros: error feedback keeps it.
        relative = relative / SCALES.to(relative)[scales.long(), None].clamp(min=float(SCALES[1]))
        heard = relative[scales > 0]
    else:
        heard = relative
    codebook = _fit(heard, quantizer).to(values.device)
    codes = _codes(relative, codebook.double(), quantizer.rounding, seed)
    return Quantized(codebook, scales, codes)


def dequantize(coded: Quantized) -> torch.Tensor:
    """Float32 [..., chunks, k], finite. A table look-up and one product: the same bits on every machine."""
    values = coded.codebook.gather(-1, coded.codes.flatten(-2).long()).view(coded.codes.shape)
    if coded.scales.numel():
        scales = SCALES.to(values.device).index_select(0, coded.scales.flatten().int())
        values *= scales.view(coded.scales.shape)[..., None]
    return values


def _scale_bytes(mean: torch.Tensor) -> torch.Tensor:
    """Mean magnitudes of chunks, relative to the largest of them, as scale bytes."""
    octaves = torch.log2(mean / mean.max())
    # 0 / 0, where all chunks are zeros.
    return (255 + octaves * STEPS_PER_OCTAVE).round().nan_to_num(nan=0, neginf=0).clamp(min=0).to(torch.uint8)


def _codes(relative: torch.Tensor, codebook: torch.Tensor, rounding: Rounding, seed: int) -> torch.Tensor:
    if rounding == "nearest":
        return torch.bucketize(relative, (codebook[1:] + codebook[:-1]) / 2).to(torch.uint8)
    above = torch.bucketize(relative, codebook).clamp(1, len(codebook) - 1)
    low, high = codebook[above - 1], codebook[above]
    # Drawn on the CPU: a GPU's generator gives other numbers.
    chance = torch.rand(relative.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    upwards = chance.to(relative.device) * (high - low) < relative - low
    return (above - 1 + upwards).to(torch.uint8)


def _fit(relative: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """An ascending codebook, float32 [2**bits]; zeros if there are no values."""
    count = 2**quantizer.bits
    if not relative.numel():
        return torch.zeros(count)
    stride = math.ceil(relative.numel() / SAMPLE)
    while math.gcd(stride, relative.shape[1]) > 1:  # so that all entries of chunks take turns
        stride += 1
    sample = relative.reshape(-1)[::stride].sort().values.cpu().numpy()
    levels = _lloyd(sample, count) if quantizer.codebook == "lloyd" else _bin_means(sample, count)
    return torch.from_numpy(levels.clip(-LARGEST, LARGEST)).float()


def _lloyd(sample: np.ndarray, count: int) -> np.ndarray:
    """Levels of least squared error: each the mean of the values nearest to it. ``sample`` ascends.

    Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28 (1982).
    """
    running = np.concatenate([[0.0], np.cumsum(sample)])
    # Halfway between levels of equal counts and of equal distances: near enough for the few rounds.
    middles = (np.arange(count) + 0.5) / count
    levels = (sample[(middles * len(sample)).astype(int)] + sample[0] + middles * (sample[-1] - sample[0])) / 2
    for _ in range(FIT_ROUNDS):
        before, levels = levels, _means_between(sample, running, (levels[1:] + levels[:-1]) / 2, levels)
        if (levels == before).all():
            break
    return levels


def _bin_means(sample: np.ndarray, count: int) -> np.ndarray:
    """Means of ``count`` equal bins, the outermost open: ``round((x - mean) / width) + count / 2`` is a value's bin."""
    running = np.concatenate([[0.0], np.cumsum(sample)])
    middle, width = sample.mean(), SIGMAS * sample.std() / count
    centres = middle + width * (np.arange(count) - count / 2)
    return _means_between(sample, running, (centres[1:] + centres[:-1]) / 2, centres)


def _means_between(sample: np.ndarray, running: np.ndarray, edges: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Means of ``sample``, which ascends, between neighbouring edges; ``otherwise`` where nothing lies between.

    ``running`` are the sums of the first 0, 1, ... values.
    """
    cuts = np.concatenate([[0], sample.searchsorted(edges), [len(sample)]])
    sums, counts = running[cuts[1:]] - running[cuts[:-1]], cuts[1:] - cuts[:-1]
    return np.where(counts > 0, sums / np.maximum(counts, 1), otherwise)
