"""Pages from the standard library's sources, and the data loader of a simulated node."""

import functools
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tplr.localnet.simulation.settings import SINGLE_BYTES
from tplr.node.data_loader import WindowBatches
from tplr.seeds import held_out_page_draw

if TYPE_CHECKING:
    from tplr.localnet.simulation.world import World

CORPUS_BYTES = 8_000_000
EVALUATION_BATCH = 32


@functools.cache
def corpus(vocabulary: int) -> np.ndarray:
    """Return the standard library's sources, one int64 token for two bytes: frequent pairs by rank, 0 for rare ones.

    With a vocabulary of ``SINGLE_BYTES`` a token is one byte.
    """
    folder, parts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "test" not in str(path.relative_to(folder)) and "site-packages" not in str(path):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size > CORPUS_BYTES:
                break
    text = b"".join(parts)
    if vocabulary == SINGLE_BYTES:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    pairs = np.frombuffer(text, dtype="<u2", count=len(text) // 2)
    frequent = np.argsort(-np.bincount(pairs, minlength=2**16), kind="stable")[: vocabulary - 1]
    token_of = np.zeros(2**16, dtype=np.int64)
    token_of[frequent] = np.arange(1, vocabulary)
    return token_of[pairs]


class SimulatedLoader:
    """The part of ``WindowDataLoader`` that observer and auditor use, with few large batches, which cost less."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def digest(self, uid: int, window: int) -> str:
        return self._world.pages(uid, window).digest

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        return _rebatched(self._world.pages(uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        pass

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int]) -> WindowBatches:
        sampler = held_out_page_draw(hotkey=hotkey, block_hash=self._world.block_hash(window + 1))
        return _rebatched(self._world.pages_of_seed(sampler.seed))


def _rebatched(pages: WindowBatches) -> WindowBatches:
    """Return the same sequences in batches of ``EVALUATION_BATCH``, if they fill whole batches."""
    sequences = pages.batches.reshape(-1, pages.batches.shape[-1])
    size = EVALUATION_BATCH if len(sequences) % EVALUATION_BATCH == 0 else pages.batches.shape[1]
    return replace(pages, batches=sequences.reshape(-1, size, sequences.shape[1]))
