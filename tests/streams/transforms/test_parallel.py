"""parallel_map and related steps: order, work in flight, errors, and no leftovers."""

import multiprocessing
import os
import threading
import time
import traceback
import weakref
from itertools import islice

import pytest
from torch.utils.data import DataLoader

from tplr.concurrency.workers import WorkerDied, Workers
from tplr.data import CheckpointableDataset
from tplr.errors import StateError
from tplr.streams.transforms import parallel
from tplr.streams.transforms.shuffle import Shuffle

N = 60
SOURCE = CheckpointableDataset.from_sequence([{"id": i} for i in range(N)])


def uneven(sample):
    """Later samples often finish first."""
    time.sleep((sample["id"] * 7 % 5) / 2000)
    return {"id": sample["id"] * 10}


def broken(sample):
    if sample["id"] in (17, 18):
        raise LookupError(f"sample {sample['id']}")
    return sample


def test_ordered_results_depend_on_no_setting():
    expected = [{"id": 10 * i} for i in range(N)]
    for workers, factor in ((1, 1), (2, 3), (7, 2)):
        assert list(SOURCE.parallel_map(uneven, workers, factor)) == expected


@pytest.mark.parametrize("cut", [0, 1, 16, 23, 59, 60])
def test_unordered_loses_and_doubles_nothing_with_work_in_flight(cut):
    dataset = SOURCE.parallel_map(uneven, 4, 4, ordered=False)
    with dataset.iter() as samples:
        first = list(islice(samples, cut))
        state = samples.state_dict()
        whole = first + list(samples)
    for _ in range(2):
        rest = list(dataset.iter(state_dict=state))
        assert sorted(s["id"] for s in first + rest) == [10 * i for i in range(N)]
    assert sorted(s["id"] for s in whole) == [10 * i for i in range(N)]


class Slow:
    """Takes long for odd or for even samples, so that passes return them in different orders."""

    odd = 0

    def __call__(self, sample):
        time.sleep(0.004 * (sample["id"] % 2 == self.odd))
        return sample


@pytest.mark.parametrize("step", ["parallel_map", "unordered parallel_map", "shuffle, parallel_map", "tokenize"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_read_ahead_lose_and_double_nothing_behind_an_unordered_one(step, ranks):
    slow = Slow()

    def pipeline(*, ordered=False, rank=0, world=1):
        dataset = SOURCE.parallel_map(slow, 3, 2, ordered=ordered)
        if "shuffle" in step:
            dataset = dataset.shuffle(5)
        if step == "tokenize":
            dataset = dataset.map(lambda s: {**s, "text": "a"}).tokenize(lambda text: {"input_ids": [1]})
        else:
            dataset = dataset.parallel_map(dict, 2, 4, ordered="unordered" not in step)
        return dataset.shard_by_rank(rank, world)

    for cut in range(0, N + 1, 7):
        with pipeline().iter() as samples:
            first = list(islice(samples, cut))
            states = [samples.state_dict()]
        slow.odd = 1 - slow.odd
        if ranks == 1:  # again, once before the next sample; then in the ordered form
            for ordered, count in ((False, 0), (False, 3), (True, 2)):
                with pipeline(ordered=ordered).iter(state_dict=states) as samples:
                    first += islice(samples, count)
                    states = [samples.state_dict()]
        ordered = ranks == 1
        parts = [pipeline(ordered=ordered, rank=rank, world=ranks).iter(state_dict=states) for rank in range(ranks)]
        rest = [sample for part in parts for sample in part]
        assert sorted(sample["id"] for sample in first + rest) == list(range(N))


@pytest.mark.parametrize("step", ["parallel_map", "tokenize"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_that_counts_samples_of_an_ordered_step_is_refused_behind_an_unordered_one(step, ranks):
    """The unordered step returns others first, so a resume would skip the wrong ones."""
    slow, refused = Slow(), 0

    def pipeline(*, ordered, rank=0, world=1):
        dataset = SOURCE.parallel_map(slow, 3, 2, ordered=ordered).map(lambda s: {**s, "text": "a"})
        if step == "tokenize":
            return dataset.tokenize(lambda text: {"input_ids": [1]}).shard_by_rank(rank, world)
        return dataset.parallel_map(dict, 2, 4).shard_by_rank(rank, world)

    for cut in range(1, N, 7):
        with pipeline(ordered=True).iter() as samples:
            first = list(islice(samples, cut))
            states = [samples.state_dict()]
        try:
            parts = [pipeline(ordered=False, rank=rank, world=ranks).iter(state_dict=states) for rank in range(ranks)]
            rest = [sample for part in parts for sample in part]
        except StateError as error:
            assert "use ordered=True there" in str(error)  # noqa: PT017 - some cuts are between two batches
            refused += 1
        else:
            assert sorted(sample["id"] for sample in first + rest) == list(range(N))
    assert refused


def test_one_slow_sample_does_not_keep_the_samples_behind_it():
    """Neither in memory nor in states."""
    ends = threading.Event()

    def blocked(sample):
        if sample["id"] == 0:
            ends.wait(60)
        return sample

    dataset = SOURCE.parallel_map(dict, 2, 4, ordered=False).parallel_map(blocked, 2, 4, ordered=False)
    with dataset.iter() as samples:
        first = list(islice(samples, 50))
        state = samples.state_dict()
        ends.set()
    assert len(state["position"]["carried"]) <= N - 50
    rest = list(dataset.iter(state_dict=state))
    assert sorted(sample["id"] for sample in first + rest) == list(range(N))


def test_a_state_of_tokenize_of_an_earlier_version_is_read():
    dataset = SOURCE.map(lambda s: {**s, "text": "a"}).tokenize(lambda text: {"input_ids": [1]})
    with dataset.iter() as samples:
        expected = list(samples)[7:]
    with dataset.iter() as samples:
        list(islice(samples, 7))
        state = samples.state_dict()
    assert state["position"].pop("carried") == []
    assert list(dataset.iter(state_dict=state)) == expected


def test_a_state_fits_other_workers_and_the_ordered_form():
    with SOURCE.parallel_map(uneven, 4, 4, ordered=False).iter() as samples:
        first = list(islice(samples, 20))
        state = samples.state_dict()
    rest = list(SOURCE.parallel_map(uneven, 1, 1).iter(state_dict=state))
    assert sorted(s["id"] for s in first + rest) == [10 * i for i in range(N)]


def test_processes_in_a_worker_of_a_data_loader_are_refused_with_a_remedy():
    loader = DataLoader(SOURCE.parallel_map(dict, 1, executor_type="process"), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match=r'use executor_type="thread", or num_workers=0'):
        list(loader)


def test_samples_that_a_state_holds_are_not_changed():
    def bump(sample):
        sample["id"] += 1000
        return sample

    shuffled = SOURCE.map(dict).shuffle(10)
    for dataset in (shuffled.parallel_map(bump, 2), shuffled.parallel_filter(lambda sample: True, 2)):
        with dataset.iter() as samples:
            for sample in islice(samples, 7):
                sample["id"] = -1
            state = samples.state_dict()
            rest = [sample["id"] for sample in samples]
        assert [sample["id"] for sample in dataset.iter(state)] == rest
        assert -1 not in rest


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_has_its_type_its_traceback_and_its_turn(ordered):
    with SOURCE.parallel_map(broken, 3, 2, ordered=ordered).iter() as samples:
        found, errors = [], []
        while len(found) + len(errors) < N:
            try:
                found.append(next(samples)["id"])
            except LookupError as error:
                errors.append(error)
                state = samples.state_dict()
        assert next(samples, None) is None
    assert sorted(map(str, errors)) == ["sample 17", "sample 18"]
    assert all("in broken" in "".join(traceback.format_exception(error)) for error in errors)
    assert sorted(found) == [i for i in range(N) if i not in (17, 18)]
    if ordered:  # the error was the sample's turn: a state after the error is after the sample
        assert [s["id"] for s in SOURCE.parallel_map(broken).iter(state_dict=state)] == list(range(19, N))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("kind", ["map", "filter", "filter_map"])
def test_an_error_names_its_sample_and_the_next_call_continues(kind, parallel):
    dataset = getattr(SOURCE, f"parallel_{kind}" if parallel else kind)(broken).map(lambda sample: sample["id"])
    with dataset.iter() as samples:
        assert list(islice(samples, 17)) == list(range(17))
        for number in (17, 18):
            with pytest.raises(LookupError) as caught:
                next(samples)
            assert caught.value.__notes__ == [f"{kind} failed for the sample {{'id': {number}}}"]
        state = samples.state_dict()
        assert list(samples) == list(range(19, N))
    assert list(dataset.iter(state_dict=state)) == list(range(19, N))


def test_the_sources_error_comes_after_what_came_before_it():
    source = SOURCE.map(broken)
    with source.parallel_map(uneven, 2, 4).iter() as samples:
        assert [next(samples)["id"] for _ in range(17)] == [10 * i for i in range(17)]
        with pytest.raises(LookupError, match="sample 17"):
            next(samples)


def test_map_must_return_something():
    for dataset in (SOURCE.map(lambda sample: None), SOURCE.parallel_map(lambda sample: None, 2)):
        with dataset.iter() as samples, pytest.raises(ValueError, match="returned None"):
            next(samples)


def test_a_function_that_ends_an_iterator_does_not_end_the_data():
    for dataset in (SOURCE.map(lambda sample: next(iter([]))), SOURCE.parallel_map(lambda sample: next(iter([])), 2)):
        with dataset.iter() as samples, pytest.raises(RuntimeError, match="raised StopIteration"):
            next(samples)


@pytest.mark.parametrize("parallel", [True, False])
def test_an_interrupt_loses_nothing(parallel):
    class Interrupting(list):
        """Is interrupted once, in the middle of reading ahead."""

        left = 1

        def __getitem__(self, i):
            if i == 21 and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return super().__getitem__(i)

    def pipeline(items):
        source = CheckpointableDataset.from_sequence(items)
        if parallel:
            return source.parallel_map(uneven, 2, 2).map(lambda s: s["id"] // 10)
        return source.map(lambda s: {"text": str(s["id"])}).tokenize(lambda text: {"input_ids": [int(text)]}).map(
            lambda s: s["input_ids"][0])  # fmt: skip

    rows = [{"id": i} for i in range(N)]
    with pipeline(Interrupting(rows)).iter() as samples:
        found = []
        while len(found) < N:
            try:
                found.append(next(samples))
            except KeyboardInterrupt:
                state, before = samples.state_dict(), list(found)
        assert found == list(range(N))
    assert before + list(pipeline(rows).iter(state_dict=state)) == list(range(N))


class Failing(list):
    """Fails once at each of some items, like a file on a network share."""

    def __init__(self, items, places) -> None:
        super().__init__(items)
        self.places = set(places)

    def __getitem__(self, i):
        if i in self.places:
            self.places.remove(i)
            raise OSError(f"item {i}")
        return super().__getitem__(i)


@pytest.mark.parametrize("how", ["ordered", "unordered", "tokenize", "tokenize in the caller's thread"])
def test_after_an_error_of_the_source_the_next_call_tries_again(how):
    def pipeline(places):
        source = CheckpointableDataset.from_sequence(Failing([{"id": i} for i in range(N)], places))
        if "ordered" in how:
            return source.parallel_map(uneven, 2, 2, ordered=how == "ordered").map(lambda s: s["id"] // 10)
        source = source.map(lambda s: {"text": str(s["id"])})
        encoded = source.tokenize(lambda text: {"input_ids": [int(text)]}, parallel=how == "tokenize")
        return encoded.map(lambda s: s["input_ids"][0])

    def read(samples, found):
        errors = []
        while (number := len(found)) < N:
            try:
                found += islice(samples, N - number)
            except OSError as error:
                errors.append((str(error), samples.state_dict(), list(found)))
                assert len(errors) <= 3
        return errors

    with pipeline([0, 21, 22]).iter() as samples:
        found = []
        errors = read(samples, found)
        assert next(samples, None) is None
    assert sorted(found) == list(range(N))
    assert [says for says, _, _ in errors] == ["item 0", "item 21", "item 22"]
    for _, state, before in errors:
        # The second resume fails among the samples that it reads again and skips.
        for places in ([], [len(before) // 2]):
            found = list(before)
            with pipeline(places).iter(state_dict=state) as samples:
                for _, again, seen in read(samples, found):
                    assert sorted([*seen, *pipeline([]).iter(state_dict=again)]) == list(range(N))
            assert sorted(found) == list(range(N))


def test_only_so_many_samples_are_read_ahead():
    read = []
    dataset = SOURCE.map(lambda sample: read.append(1) or sample).parallel_map(uneven, 2, 2)
    with dataset.iter() as samples:
        next(samples)
        time.sleep(0.05)
        assert len(read) <= 32  # groups of 16


class Position(dict):
    """A position that can have weak references."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["map", "filter", "filter_map"])
def test_positions_of_returned_samples_are_dropped_without_a_state(monkeypatch, kind, ordered):
    positions = weakref.WeakSet()
    state = Shuffle.iterator.state

    def noted(iterator):
        positions.add(position := Position(state(iterator)))
        return position

    monkeypatch.setattr(Shuffle.iterator, "state", noted)
    shuffled = CheckpointableDataset.from_sequence([{"id": 1}], repeat=True).shuffle(10)
    with getattr(shuffled, f"parallel_{kind}")(lambda sample: sample, 1, 2, ordered=ordered).iter() as samples:
        for _ in range(30):
            assert len(list(islice(samples, 100))) == 100
            assert len(positions) <= 10


@pytest.mark.parametrize("wrong", [{"max_workers": 0}, {"prefetch_factor": 0}, {"executor_type": "fork"}])
def test_refused_arguments(wrong):
    with pytest.raises(ValueError, match="expected"):
        SOURCE.parallel_map(uneven, **wrong)


def test_default_workers_share_the_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert SOURCE.parallel_map(uneven).transform.workers == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert SOURCE.parallel_map(uneven).transform.workers == os.cpu_count()


def test_closing_or_dropping_ends_the_threads():
    before = threading.active_count()
    samples = SOURCE.parallel_map(uneven, 5).iter()
    next(samples)
    assert threading.active_count() == before + 5
    samples.close()
    samples.close()
    assert threading.active_count() == before
    samples = SOURCE.parallel_map(uneven, 5).iter()
    next(samples)
    del samples
    assert threading.active_count() == before


def test_a_closed_iterator_raises_instead_of_waiting():
    samples = SOURCE.parallel_map(uneven, 1, 1).iter()
    next(samples)
    samples.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(samples)


class Kept(str):
    """Code that can't be sent to a process."""

    def __reduce__(self):
        raise TypeError("can't pickle this code")


def test_processes_get_batches_and_each_sample_has_its_own_error(monkeypatch):
    monkeypatch.setattr(parallel, "_BATCH_SECONDS", 1e9)  # on a machine of any speed
    sizes = []
    submit = Workers.submit
    monkeypatch.setattr(Workers, "submit", lambda self, item: sizes.append(len(item)) or submit(self, item))
    # Code, which a process runs without an import of this file. A value that can't be sent back, a failure, and code
    # that can't be sent.
    work = [f"{{'id': {i}, 'process': __import__('os').getpid()}}" for i in range(100)]
    work[41:44] = "lambda: None", "{}[42]", Kept(work[43])
    dataset = CheckpointableDataset.from_sequence(work).parallel_map(eval, 1, 16, executor_type="process")
    with dataset.iter() as samples:
        found = list(islice(samples, 41))
        for number, error, message in ((41, Exception, "pickle"), (42, LookupError, "42"), (43, TypeError, "pickle")):
            with pytest.raises(error, match=message) as caught:
                next(samples)
            assert f"map failed for the sample {repr(work[number])[:10]}" in caught.value.__notes__[0]
            state = samples.state_dict()
        found += list(samples)
    assert [sample["id"] for sample in found] == [*range(41), *range(44, 100)]
    assert os.getpid() not in {sample["process"] for sample in found}
    assert 8 <= max(sizes) <= 64
    assert sum(sizes) == 100
    rest = CheckpointableDataset.from_sequence(work).parallel_map(eval, 1, 16).iter(state_dict=state)
    assert [sample["id"] for sample in rest] == list(range(44, 100))


def test_a_batch_of_a_process_that_died_is_not_lost():
    """The sample at which it died is unknown, so a resume computes the whole batch again."""
    work = [*["1"] * 40, "__import__('os')._exit(3) if __import__('os').getppid() != PARENT else 2", *["3"] * 10]
    work[40] = work[40].replace("PARENT", str(os.getppid()))
    source = CheckpointableDataset.from_sequence(work)
    with source.parallel_map(eval, 1, 8, executor_type="process").iter() as samples:
        found = []
        for _ in range(2):  # and again
            with pytest.raises(WorkerDied, match="status 3") as caught:
                found.extend(samples)
        assert f"of which the first is {work[len(found)]!r}" in caught.value.__notes__[0]
        state = samples.state_dict()
    assert found == [1] * len(found)
    assert len(found) <= 40
    rest = list(source.parallel_map(eval, 1).iter(state_dict=state))
    assert found + rest == [1] * 40 + [2] + [3] * 10


def test_processes():
    """One start for all: results, errors with type and traceback, a reported death, and no process left."""
    work = ["__import__('math').sqrt(4)", "__import__('math').sqrt(-1)", "3.0", "__import__('os')._exit(3)"]
    dataset = CheckpointableDataset.from_sequence(work)
    before = {one.pid for one in multiprocessing.active_children()}  # of other tests in this process
    with dataset.parallel_map(eval, 1, 1, executor_type="process").iter() as samples:
        assert next(samples) == 2.0
        assert len({one.pid for one in multiprocessing.active_children()} - before) == 1
        with pytest.raises(ValueError, match="math domain") as caught:
            next(samples)
        assert "line 1, in <module>" in str(caught.value.__cause__)
        assert next(samples) == 3.0
        with pytest.raises(WorkerDied, match="status 3"):
            next(samples)
    assert {one.pid for one in multiprocessing.active_children()} <= before
    with pytest.raises(TypeError, match='executor_type="thread"'):
        next(SOURCE.parallel_map(lambda sample: sample, 1, executor_type="process").iter())
