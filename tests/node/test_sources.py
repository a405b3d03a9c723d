"""Mining on a token store: every node samples the same sequences, and training on other ones is detected."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tplr.disk_cache import DiskCache
from tplr.errors import DataError
from tplr.hparams import HParams, StoreParams, load_hparams
from tplr.node import observer
from tplr.node.data_loader import WindowDataLoader
from tplr.node.observer import Observation, Observer
from tplr.node.sources import StoreDataSource
from tplr.schemas import PeerObservation
from tplr.stores.bucket import open_bucket_store
from tplr.stores.expected_files import local_prefix
from tplr.stores.sequences import SampleReader
from tplr.stores.writer import Column, write_shard

LENGTH, UIDS, SAMPLES, WINDOW = 16, 4, 6, 41


class Comms:
    hotkey = "5F"

    async def window_hash(self, window: int) -> str:
        return f"0x{window:064x}"


@pytest.fixture
def hparams() -> HParams:
    hparams = load_hparams(Path(__file__).parents[2] / "hparams-demo.json")
    store = StoreParams(samples_per_window=SAMPLES, uids=UIDS)
    return hparams.model_copy(update={"batch_size": 2, "sequence_length": LENGTH, "data": "store", "store": store})


def write_store(folder: Path, first: float = 0, dtype: str = "int32") -> None:
    for number in range(2):
        tokens = np.arange(first, first + 40 * LENGTH + 5).astype(dtype) + 1000 * number
        columns = {"sequence": Column(tokens, np.array([0, len(tokens)]))}
        write_shard(folder / f"shard_{number:04d}", columns, "bin", number=number, tokens=len(tokens))


async def source_of(folder: Path, cache: Path, hparams: HParams) -> StoreDataSource:
    store, prefix = local_prefix(folder)
    opened, reader = await open_bucket_store([store], prefix, DiskCache(cache, max_bytes=1 << 30))
    vocab_size = hparams.model.vocab_size
    return StoreDataSource(SampleReader(opened, reader, sequence_length=LENGTH, vocab_size=vocab_size), hparams)


@pytest.fixture
async def data_loader(tmp_path: Path, hparams: HParams) -> AsyncIterator[WindowDataLoader]:
    write_store(tmp_path / "store")
    async with WindowDataLoader(
        await source_of(tmp_path / "store", tmp_path / "cache", hparams), Comms()
    ) as data_loader:  # type: ignore[arg-type]
        yield data_loader


async def test_uids_of_a_window_get_different_sequences_of_the_store(data_loader: WindowDataLoader) -> None:
    stream = np.concatenate([np.arange(645), np.arange(645) + 1000])
    seen: set[int] = set()
    for uid in range(UIDS):
        data_loader.read_ahead(uid, WINDOW)
        own = await data_loader.assigned(uid, WINDOW)
        assert own.batches.shape == (3, 2, LENGTH)
        assert own.batches.dtype == np.int64
        for row in own.batches.reshape(-1, LENGTH):
            (number,) = [
                i for i in range(len(stream) // LENGTH) if (stream[i * LENGTH : (i + 1) * LENGTH] == row).all()
            ]
            assert number not in seen
            seen.add(number)
        assert await data_loader.digest(uid, WINDOW) == own.digest
    control = await data_loader.held_out(WINDOW, "5F", range(UIDS))
    assert control.batches.shape == (3, 2, LENGTH)
    with pytest.raises(DataError, match="no share of the store"):
        await data_loader.assigned(UIDS, WINDOW)
    assert await data_loader.digest(UIDS, WINDOW) == ""  # no update can name it


async def test_another_version_of_the_store_is_detected(
    tmp_path: Path, hparams: HParams, data_loader: WindowDataLoader
) -> None:
    write_store(tmp_path / "other", first=1)
    source = await source_of(tmp_path / "other", tmp_path / "cache", hparams)
    async with WindowDataLoader(source, Comms()) as other:  # type: ignore[arg-type]
        assert await other.digest(1, WINDOW) != await data_loader.digest(1, WINDOW)
    write_store(tmp_path / "foreign", first=hparams.model.vocab_size)
    source = await source_of(tmp_path / "foreign", tmp_path / "cache", hparams)
    async with WindowDataLoader(source, Comms()) as foreign:  # type: ignore[arg-type]
        with pytest.raises(DataError, match="prepared with another tokenizer"):
            await foreign.assigned(1, WINDOW)
    write_store(tmp_path / "floats", first=0.5, dtype="float32")
    source = await source_of(tmp_path / "floats", tmp_path / "cache", hparams)
    async with WindowDataLoader(source, Comms()) as floats:  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"item \d+: its 'sequence' holds \d+\.5, expected whole numbers"):
            await floats.assigned(1, WINDOW)


async def test_a_miner_that_trains_on_other_samples_is_not_measured(
    data_loader: WindowDataLoader, hparams: HParams
) -> None:
    named = {
        0: await data_loader.digest(0, WINDOW),  # honest
        1: await data_loader.digest(0, WINDOW),  # on another uid's sequences
        2: await data_loader.digest(2, WINDOW - 1),  # on those of the previous window
        UIDS: "0" * 64,  # without a share
    }
    updates: list[Any] = [
        SimpleNamespace(uid=uid, update=SimpleNamespace(pages_digest=digest)) for uid, digest in named.items()
    ]
    reported: list[str] = []

    def evaluated(update: Any, *_: Any) -> None:
        reported.append(update.pages_digest)
        raise DataError("what comes of it is none of this test's business")

    nothing = SimpleNamespace(emit=lambda *_, **__: None)
    context: Any = SimpleNamespace(comms=Comms(), telemetry=nothing)
    state: Any = SimpleNamespace(evaluate=evaluated)
    watching = Observer(state, data_loader, context, hparams)
    seen = Observation(WINDOW, {uid: PeerObservation(hotkey="5F", sampled=True) for uid in named})
    await watching._note_pages(seen, updates)
    found = {uid: one.assigned_pages for uid, one in seen.observations.items()}
    assert found == {0: True, 1: False, 2: False, UIDS: False}
    before: Any = SimpleNamespace(losses=np.zeros(1))
    await watching._evaluate(seen, observer._with_own_pages(seen, updates), before, seed=1)
    assert reported == [named[0]]  # only the honest one
