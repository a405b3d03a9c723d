"""Places of ranks: every place of an epoch once, through any changes of the number of ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplr.errors import StateError
from tplr.sharding import Share
from tplr.streams.shared_places import ENDLESS, Former, SharedPlaces, divide_places
from tplr.streams.state import StateReader


def reader(state: dict) -> StateReader:
    return StateReader("places", json.loads(json.dumps(state)))


def take(places: SharedPlaces, count: int) -> list[tuple[int, int]]:
    """Return the next places with their epochs, with a resume before each."""
    found = []
    while len(found) < count:
        for place in places.run:
            found.append((places.epoch, place))
            break
        else:
            if not places.advance():
                break
    return found


@given(
    length=st.integers(5, 40),
    repeat=st.booleans(),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_place_of_an_epoch_is_read_once_through_changes_of_the_world(length, repeat, worlds, data):
    former: list[Former] | None = None
    seen: list[tuple[int, int]] = []
    for world in worlds:
        shares = [Share(index, world) for index in range(world)]
        states = [reader(divide_places(former, length, share)) if former else None for share in shares]
        ranks = [
            SharedPlaces(length, share, repeat, "items", state) for share, state in zip(shares, states, strict=True)
        ]
        for rank in ranks:
            seen += take(rank, data.draw(st.integers(0, length)))
        former = [Former(share, reader(rank.state())) for share, rank in zip(shares, ranks, strict=True)]
    assert len(seen) == len(set(seen))
    last = max((epoch for epoch, _ in seen), default=0)
    rest = [place for rank in ranks for place in take(rank, (last + 2) * length)]
    done = [place for place in [*seen, *rest] if place[0] <= last]
    assert sorted(done) == [(epoch, place) for epoch in range(last + 1) for place in range(length)]


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_places_of_an_order_without_end(old, new, data):
    ranks = [SharedPlaces(ENDLESS, Share(index, old), False, "items") for index in range(old)]
    seen = [place for rank in ranks for place in take(rank, data.draw(st.integers(0, 9)))]
    former = [Former(Share(index, old), reader(rank.state())) for index, rank in enumerate(ranks)]
    for index in range(new):
        share = Share(index, new)
        seen += take(SharedPlaces(ENDLESS, share, False, "items", reader(divide_places(former, ENDLESS, share))), 60)
    assert len(seen) == len(set(seen))
    assert {(0, place) for place in range(60)} <= set(seen)


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_places_that_become_finer(old, finer, data):
    ranks = [SharedPlaces(7, Share(index, old), False, "files") for index in range(old)]
    seen = [place for rank in ranks for _, place in take(rank, data.draw(st.integers(0, 3)))]
    former = [Former(Share(index, old), reader(rank.state())) for index, rank in enumerate(ranks)]
    found = []
    for index in range(5):
        share = Share(index, 5)
        found += take(SharedPlaces(7 * finer, share, False, "f", reader(divide_places(former, 7, share, finer))), 99)
    assert sorted(found) == [(0, place) for place in range(7 * finer) if place // finer not in seen]


def test_ranks_that_are_equally_far_leave_one_range_and_equal_parts():
    ranks = [SharedPlaces(100, Share(index, 4), False, "items") for index in range(4)]
    for rank in ranks:
        take(rank, 5)
    former = [Former(Share(index, 4), reader(rank.state())) for index, rank in enumerate(ranks)]
    divided = [divide_places(former, 100, Share(index, 5)) for index in range(5)]
    counts = [len(take(SharedPlaces(100, Share(i, 5), False, "items", reader(d)), 99)) for i, d in enumerate(divided)]
    assert counts == [16] * 5


def test_a_place_is_put_back():
    places = SharedPlaces(9, Share(1, 2), False, "items")
    assert take(places, 2) == [(0, 1), (0, 3)]
    places.put_back()
    assert take(places, 9) == [(0, 3), (0, 5), (0, 7)]
    places.put_back()
    assert take(places, 9) == [(0, 7)]


def test_too_few_places_are_refused():
    with pytest.raises(ValueError, match="3 files can't be shared by 4 ranks × workers"):
        SharedPlaces(3, Share(0, 4), False, "files")
    SharedPlaces(0, Share(0, 4), False, "files")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": -1}, "epoch: expected a whole number"),
        ({"next": "3"}, "next: expected a whole number"),
        ({"next": 99}, "next: expected a place of 9"),
        ({"step": 0}, "step: expected a whole number of 1 or more"),
        ({"rest": [[0, 0, 99, 1]]}, "rest: expected ranges of 9 places"),
        ({"rest": [[0, 1, 2]]}, "rest: expected lists"),
        ({"rest": {}}, "rest: expected a list"),
    ],
)
def test_damaged_states_are_refused(change, says):
    with pytest.raises(StateError, match=says):
        SharedPlaces(9, Share(0, 1), False, "items", reader({"epoch": 0, "next": 3, "step": 1} | change))
