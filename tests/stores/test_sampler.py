"""The sampler against lists: union, order and repeats for any number of ranks, also if it changes in mid-epoch."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tplr.errors import StateError
from tplr.stores.sampler import ResumableDistributedSampler


def sampler(n: int, world: int, rank: int, **options) -> ResumableDistributedSampler:
    return ResumableDistributedSampler(range(n), rank=rank, world_size=world, **options)


def everyone(n: int, world: int, **options) -> list[list[int]]:
    return [[*sampler(n, world, rank, **options)] for rank in range(world)]


@given(
    n=st.integers(1, 40),
    world=st.integers(1, 8),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    order=st.sampled_from(["portable", "torch"]),
    epoch=st.integers(0, 2),
)
@settings(max_examples=60)
def test_ranks_together_take_the_epochs_order(n, world, drop_last, shuffle, order, epoch) -> None:
    if drop_last and n < world:
        with pytest.raises(ValueError, match=f"{n} items are fewer than {world} ranks"):
            sampler(n, world, 0, drop_last=drop_last)
        return
    options = {"shuffle": shuffle, "order": order, "start_epoch": epoch}
    (whole,) = everyone(n, 1, **options)
    assert sorted(whole) == [*range(n)]
    if not shuffle:
        assert whole == [*range(n)]
    total = n // world * world if drop_last else -(-n // world) * world
    expected = [*itertools.islice(itertools.cycle(whole), total)]
    ranks = everyone(n, world, drop_last=drop_last, **options)
    assert [index for step in zip(*ranks, strict=True) for index in step] == expected


@given(n=st.integers(1, 40), old=st.integers(1, 8), new=st.integers(1, 8), steps=st.integers(0, 40))
@settings(max_examples=60)
def test_the_number_of_ranks_may_change_in_mid_epoch(n, old, new, steps) -> None:
    before = [sampler(n, old, rank) for rank in range(old)]
    steps %= len(before[0])
    taken = [index for step in zip(*([*itertools.islice(one, steps)] for one in before), strict=True) for index in step]
    state = before[0].state_dict()
    after = [sampler(n, new, rank) for rank in range(new)]
    if steps * old % new:
        with pytest.raises(StateError, match=f"can't be divided among {new} ranks"):
            after[0].load_state_dict(state)
        return
    for one in after:
        one.load_state_dict(state)
        one.load_state_dict(state)  # it is not used up
    if len(taken) >= -(-n // new) * new:  # repeats filled the old ranks' shares, so this epoch is done
        assert {(one.epoch, one.iter) for one in after} == {(1, 0)}
        return
    rest = [index for step in zip(*map(list, after), strict=True) for index in step]
    (whole,) = everyone(n, 1)
    total = -(-n // new) * new
    assert taken + rest == [*itertools.islice(itertools.cycle(whole), max(total, len(taken)))]


def test_epochs_follow_each_other_with_orders_of_their_own() -> None:
    one = sampler(10, 2, 1)
    epochs = [[*one], [*one]]
    assert (one.epoch, one.iter, len(one)) == (2, 0, 5)
    assert epochs[0] != epochs[1]
    assert epochs == [everyone(10, 2, start_epoch=epoch)[1] for epoch in (0, 1)]


def test_a_loop_that_was_left_begins_again_or_continues_from_its_state() -> None:
    one = sampler(10, 1, 0)
    (whole,) = everyone(10, 1)
    first = [*itertools.islice(one, 4)]
    assert (one.iter, len(one)) == (4, 6)
    assert [*itertools.islice(one, 7)] == whole[:7]
    one.load_state_dict(one.state_dict(consumed=4))
    for _ in range(2):  # from the loaded state, also after another break
        assert [*itertools.islice(one, 5)] == whole[4:9]
    assert [*first, *one] == whole
    last = [*itertools.islice(one, 10)]  # left at the very end
    assert len(last) == len(one) == 10
    assert [*one] == everyone(10, 1, start_epoch=2)[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_loses_nothing_that_it_had_read_ahead(workers: int) -> None:
    epochs = [everyone(40, 1, start_epoch=epoch)[0] for epoch in range(3)]
    plain = DataLoader(range(40), batch_size=2, sampler=sampler(40, 1, 0), num_workers=workers)
    next(iter(plain))
    assert torch.cat([*plain]).tolist() == epochs[0]

    loader = StatefulDataLoader(range(40), batch_size=2, sampler=sampler(40, 1, 0), num_workers=workers)
    assert torch.cat([*loader]).tolist() == epochs[0]
    resumed = StatefulDataLoader(range(40), batch_size=2, sampler=sampler(40, 1, 0), num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert [torch.cat([*resumed]).tolist() for _ in range(2)] == epochs[1:]


def test_start_iter_counts_this_ranks_samples() -> None:
    (whole,) = everyone(12, 1)
    assert everyone(12, 2, start_iter=4) == [whole[8::2], whole[9::2]]
    done = sampler(12, 2, 0, start_iter=6)  # a whole epoch leads into the next
    assert (done.epoch, done.iter) == (1, 0)


def test_torchs_order_is_the_documented_one() -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(7 + 3)).tolist()
    assert everyone(9, 1, seed=7, start_epoch=3, order="torch") == [order]


def test_two_items_for_eight_ranks_and_no_items() -> None:
    assert sorted(itertools.chain(*everyone(2, 8))) == [0] * 4 + [1] * 4
    with pytest.raises(ValueError, match="0 items"):
        sampler(0, 1, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 1}, "seed 42, this sampler 1"),
        ({"drop_last": True}, "drop_last"),
        ({"shuffle": False}, "shuffle"),
        ({"order": "torch"}, "order"),
    ],
)
def test_states_of_other_orders_are_refused(options, says: str) -> None:
    state = sampler(10, 1, 0).state_dict()
    with pytest.raises(StateError, match=says):
        sampler(10, 1, 0, **options).load_state_dict(state)
    with pytest.raises(StateError, match="length 10, this sampler 11"):
        sampler(11, 1, 0).load_state_dict(state)
    with pytest.raises(StateError, match="keys"):
        sampler(10, 1, 0).load_state_dict({**state, "more": 1})


@pytest.mark.parametrize("consumed", [-2, 3, 12, 10**9])
def test_impossible_numbers_of_samples_are_not_saved(consumed: int) -> None:
    one = sampler(10, 2, 0)
    with pytest.raises(ValueError, match=rf"consumed {consumed}: .* a multiple of 2 from 0 to 10"):
        one.state_dict(consumed)
    assert [one.state_dict(number)["consumed"] for number in (0, 2, 10)] == [0, 2, 10]
    with pytest.raises(TypeError):
        one.state_dict(2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["epoch", "consumed"])
@pytest.mark.parametrize("bad", [-2, 2.0, "2", None, True, 1 << 80])
def test_damaged_states_are_refused_and_change_nothing(key: str, bad: object) -> None:
    one = sampler(10, 2, 0, start_epoch=1, start_iter=2)
    with pytest.raises(StateError, match=f"has {key} .*, expected a whole number from 0 to"):
        one.load_state_dict({**one.state_dict(), key: bad})
    assert (one.epoch, one.iter) == (1, 2)
    with pytest.raises(StateError, match="expected a dictionary, got list"):
        one.load_state_dict([])  # type: ignore[arg-type]
    dropping = sampler(10, 2, 0, drop_last=True)
    with pytest.raises(StateError, match="has consumed 12, expected a whole number from 0 to 10"):
        dropping.load_state_dict({**dropping.state_dict(), "consumed": 12})


def test_numbers_of_numpy_are_numbers() -> None:
    one = sampler(10, 2, 0)
    one.load_state_dict({**one.state_dict(np.int64(4)), "consumed": np.int64(4)})
    assert one.state_dict() == sampler(10, 2, 0, start_iter=2).state_dict()


def test_what_was_trained_on_counts_not_what_a_loader_read_ahead() -> None:
    ahead = sampler(20, 2, 0)
    [*itertools.islice(ahead, 8)]
    again = sampler(20, 2, 0)
    again.load_state_dict(ahead.state_dict(consumed=6))
    assert again.iter == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_has_read_the_whole_epoch_does_not_end_it(workers: int) -> None:
    data = range(10)
    one = sampler(10, 1, 0)
    again = sampler(10, 1, 0)
    seen: list[int] = []
    for batch in DataLoader(data, batch_size=4, sampler=one, num_workers=workers):
        seen += batch.tolist()
        again.load_state_dict(one.state_dict(consumed=len(seen)))
        if len(seen) < 10:
            assert [*seen, *again] == everyone(10, 1)[0]
    assert (again.epoch, again.iter) == (1, 0)
    again.load_state_dict(one.state_dict(consumed=0))  # counted from the epoch's end
    assert (again.epoch, again.iter) == (1, 0)
    assert [*itertools.islice(again, 3)] == everyone(10, 1, start_epoch=1)[0][:3]
    assert again.state_dict(consumed=3) == {**one.state_dict(), "consumed": 3}


def test_an_epoch_of_which_a_loader_has_read_all_and_nothing_was_used_is_not_skipped() -> None:
    epochs = [everyone(10, 1, start_epoch=epoch)[0] for epoch in range(3)]
    one, again = sampler(10, 1, 0), sampler(10, 1, 0)
    loader = DataLoader(range(10), batch_size=4, sampler=one, num_workers=2)
    for epoch in range(2):
        batches = iter(loader)  # reads the whole epoch ahead
        again.load_state_dict(one.state_dict(consumed=0, epoch=epoch))
        assert [*again] == epochs[epoch]
        next(batches)
        one.load_state_dict(one.state_dict(consumed=0, epoch=epoch))
        assert torch.cat([*loader]).tolist() == epochs[epoch]
    again.load_state_dict(one.state_dict(consumed=0, epoch=2))
    assert [*again] == epochs[2]
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"epoch {wrong} with consumed 0: .* of epoch 1 or 2"):
            one.state_dict(0, wrong)
    with pytest.raises(ValueError, match="epoch 1 with consumed None"):
        one.state_dict(epoch=1)


def test_ten_million_windows_take_no_memory_of_their_number() -> None:
    import tracemalloc

    tracemalloc.start()
    peaks = []
    for n in (10_000, 10_000_000):
        one = sampler(n, 1, 0)
        tracemalloc.reset_peak()
        assert len({*itertools.islice(one, 9000)}) == 9000
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
