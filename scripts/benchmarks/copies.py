"""Measures how long a validator takes to search for copies among 256 miners, on one core.

    python scripts/benchmarks/copies.py

A search compares the updates of a window and of the window before: 512 updates of 150 million parameters. The first
figure is for taking the coordinates in the sampled chunks out of 512 updates, the second for comparing all pairs. The
coordinates are random, which is the worst case: the matrix is as wide as the union of all coordinates, and those of
real updates overlap more. Prints processor seconds and peak extra memory of both.
"""

import time
from collections.abc import Callable

import torch
from compress import SIZES, Ours, extra_memory, llama

from tplr.compress.payload import parse
from tplr.scoring.copies import find_copies
from tplr.scoring.overlap import Traits, sample_chunks, traits

MINERS = 256
MILLIONS = 150


def measured(what: str, work: Callable[[], object]) -> None:
    """Prints time and memory of a call. Memory is measured first, because its first call fills the caches."""
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
    sample = sample_chunks(ours.spec, seed=0)
    entries = sum(ours.spec.tensors[name].grid.entries * len(chunks) for name, chunks in sample.items())
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
