"""Values ↔ a few bits each: sign and level, times a scale of the chunk.

``value = ± (low + level * step) * SCALES[scale]``, with ``low`` and ``step`` (float32) fitted to each tensor, one
``scale`` byte a chunk, and ``level`` below ``2**(bits - 1)``.

Chunks of one tensor differ in size by orders of magnitude (rows of rare tokens), so the byte for a chunk's scale buys
more than as many bits for its values. Squared error over squared value, mean over the matrices and worst matrix of a
small Llama's momentum (hidden 128, 4 layers, 60 steps on source code), k = 32 of 4096:

===========================================  ===========  ======  ==========
quantizer                                    bits/value   error   worst one
===========================================  ===========  ======  ==========
1 bit, chunk scale (here)                    1.25         0.0243  0.040
2 bits, one best codebook a tensor           2.00         0.0222  0.226
2 bits, six-sigma bins, one codebook         2.00         0.0695  0.279
2 bits, chunk scale (here)                   2.25         0.0091  0.042
4 bits, chunk scale (here)                   4.25         0.0011  0.007
===========================================  ===========  ======  ==========
"""

from dataclasses import dataclass

import torch

STEPS_PER_OCTAVE = 8
# Scale bytes: 0 for a chunk of zeros, else 2**((byte - 255) / 8): at most 1, down to 2**-31.75.
SCALES = torch.tensor([0.0] + [2.0 ** ((byte - 255) / STEPS_PER_OCTAVE) for byte in range(1, 256)])
# Far above any real value; below it nothing that is computed from decoded values can overflow.
LARGEST = 2.0**100
FIT_ROUNDS = 10


@dataclass(frozen=True)
class Quantized:
    """One tensor's values.

    Attributes:
        ladder: float32 [2], ``low`` and ``step``; finite, in [0, LARGEST].
        scales: uint8 [chunks].
        codes: uint8 [chunks, k], ``2 * level + negative``.
    """

    ladder: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


def quantize(values: torch.Tensor, bits: int) -> Quantized:
    """Code float [chunks, k] in ``bits`` (1, 2, 4, 8) each; the mean magnitude of a chunk sets its scale."""
    values = values.to(torch.float64)
    mean = values.abs().mean(dim=1)
    octaves = torch.log2(mean / mean.max())
    # A chunk below the smallest scale, and 0 / 0, are sent as zeros: error feedback keeps them.
    scales = (255 + octaves * STEPS_PER_OCTAVE).round().nan_to_num(nan=0, neginf=0).clamp(min=0).to(torch.uint8)
    heard = scales > 0
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    ladder = torch.zeros(2, dtype=torch.float32)
    if heard.any():
        spoken = values[heard]
        relative = spoken.abs() / SCALES.to(values)[scales[heard].long(), None]
        low, step = _fit(relative, 2 ** (bits - 1))
        ladder = torch.tensor([low, step], dtype=torch.float32)
        codes[heard] = _levels(relative, low, step, 2 ** (bits - 1)).to(torch.uint8) * 2 + (spoken < 0)
    return Quantized(ladder, scales, codes)


def dequantize(coded: Quantized, bits: int) -> torch.Tensor:
    """Float32 [chunks, k], finite. A table look-up and one product: the same bits on every machine."""
    low, step = coded.ladder.tolist()
    ladder = torch.tensor([low + level * step for level in range(2 ** (bits - 1))], dtype=torch.float32)
    table = torch.stack([ladder, -ladder], dim=1).view(-1).to(coded.codes.device)
    return table[coded.codes.long()] * SCALES.to(coded.codes.device)[coded.scales.long(), None]


def _levels(relative: torch.Tensor, low: float, step: float, count: int) -> torch.Tensor:
    return ((relative - low) / step).round().clamp(0, count - 1) if step > 0 else torch.zeros_like(relative)


def _fit(relative: torch.Tensor, count: int) -> tuple[float, float]:
    """``low`` and ``step`` of the ladder nearest to these magnitudes: Lloyd's rounds, the ladder by least squares."""
    mean = relative.mean().item()
    if count == 1:
        return mean, 0.0
    low = relative.min().item()
    step = (relative.max().item() - low) / (count - 1)
    for _ in range(FIT_ROUNDS):
        levels = _levels(relative, low, step, count)
        middle = levels.mean()
        spread = (levels - middle).square().sum().item()
        if spread == 0:
            return mean, 0.0
        step = ((levels - middle) * (relative - mean)).sum().item() / spread
        low = mean - step * middle.item()
        if low < 0:
            low, step = 0.0, ((levels * relative).sum() / levels.square().sum()).item()
    return low, step
