"""What it costs a validator to look for copies among 256 miners: their updates of a window, and of the one before.

    python scripts/benchmarks/copies.py

One core. Of real updates of 150 million parameters it takes the coordinates in the sampled chunks, 512 times; then all
pairs of 512 are compared. These are drawn at random, which is the dearest case: real ones have more in common, and
the matrix is as wide as all their coordinates together. Prints seconds of both, and the most memory beyond what was
held before.
"""

import time
from collections.abc import Callable

import torch
from compress import SIZES, Ours, extra_memory, llama

from tplr.compress.payload import parse
from tplr.scoring.copies import find_copies
from tplr.scoring.overlap import Sample, Traits, traits

MINERS = 256
MILLIONS = 150


def measured(what: str, work: Callable[[], object]) -> None:
    """Memory first, whose first call fills caches; then the time of a call."""
    memory = extra_memory(work)
    began = time.process_time()
    work()
    print(f"{what}: {time.process_time() - began:.1f} s of a core, {memory / 1e6:.0f} MB")


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = llama(*SIZES[MILLIONS])
    ours = Ours({name: torch.zeros(shape) for name, shape in shapes.items()})
    body = ours.encode({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    update = parse(body, ours.spec, window=1, uid=0)
    sample = Sample.of(ours.spec, seed=0)
    entries = sum(ours.spec.tensors[name].grid.entries * len(chunks) for name, chunks in sample.chunks.items())
    sent = len(traits(update, sample).columns)

    def sampled() -> Traits:
        return Traits(torch.randperm(entries, generator=generator)[:sent].sort().values, 1.0)

    now, before = ({uid: sampled() for uid in range(MINERS)} for _ in range(2))
    fixed: dict[int, float | None] = {uid: float(uid) for uid in now}
    measured("coordinates of 512 updates", lambda: [traits(update, sample) for _ in range(2 * MINERS)])
    measured(f"all pairs of 512, {sent} coordinates each", lambda: find_copies(now, before, fixed))
    assert not find_copies(now, before, fixed), "random updates are no copies"


if __name__ == "__main__":
    main()
