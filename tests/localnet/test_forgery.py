"""The plan of a hostile node, and its forgeries of real documents."""

import json
import random

import pytest

from tplr.errors import PayloadError
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.snapshot import MAX_MANIFEST_BYTES
from tplr.localnet.attackers.forgery import (
    BEHAVIOURS,
    BOMB_BYTES,
    FORGERIES,
    UNLISTED_UID,
    behaviour,
    bomb,
    encoded,
    falsified,
    with_false_hashes,
)
from tplr.schemas import DebugReport, PeerList, StartWindow
from tplr.untrusted import parse_untrusted

SET = IncludedSet(
    window=9,
    version="1",
    included=tuple(Included(uid=uid, sha256=f"{uid:064x}", size=1000) for uid in (1, 2)),
    skipped={},
    success_rate=1.0,
)
LIST = PeerList(peers=(1, 2), reserve_peers=(3,), initial_selection=False, sync_window=7, first_effective_window=9)
REPORT = DebugReport(
    window=9,
    uid=0,
    fingerprint="a" * 64,
    outer_fingerprint="e" * 64,
    proof="b" * 64,
    digest="c" * 64,
    included={"1": "d" * 64},
    skipped={},
)


def body_of(document):
    return encoded(document.model_dump(mode="json"))


def test_every_behaviour_comes_once_in_as_many_windows_and_follows_from_the_seed():
    for start in (0, 3 * len(BEHAVIOURS)):
        found = [behaviour(1, window) for window in range(start, start + len(BEHAVIOURS))]
        assert sorted(found) == sorted(BEHAVIOURS)
        assert found == [behaviour(1, window) for window in range(start, start + len(BEHAVIOURS))]
    plans = {tuple(behaviour(seed, window) for window in range(7)) for seed in range(20)}
    assert len(plans) > 15


@pytest.mark.parametrize(
    "document", [SET, LIST, REPORT, StartWindow(start_window=5)], ids=lambda one: type(one).__name__
)
def test_a_false_document_says_something_else_and_its_own_window(document):
    body = body_of(document)
    for seed in range(20):
        false = json.loads(falsified(body, random.Random(seed)))
        assert false != json.loads(body)
        assert false.get("window") == json.loads(body).get("window")


def test_a_document_in_which_nothing_can_be_false_stays():
    assert falsified(b'{"window":5}', random.Random(1)) == b'{"window":5}'


def test_each_forgery_of_a_set():
    document = json.loads(body_of(SET))
    sizes, unlisted, hashes, windows, empty = (forge(document, random.Random(1)) for forge in FORGERIES)
    assert [one["size"] for one in sizes["included"]] == [2**50] * 2
    assert [one["uid"] for one in unlisted["included"]] == [1, 2, UNLISTED_UID]
    assert not {one["sha256"] for one in hashes["included"]} & {one.sha256 for one in SET.included}
    assert windows == document
    assert empty["included"] == []
    assert [one["uid"] for one in hashes["included"]] == [1, 2]
    peers = FORGERIES[1](json.loads(body_of(LIST)), random.Random(1))
    assert peers["peers"] == [1, 2, UNLISTED_UID]


def test_false_hashes_are_no_hashes_of_the_document_and_equal_ones_stay_equal():
    false = json.loads(with_false_hashes(body_of(REPORT), random.Random(1)))
    assert not {false["fingerprint"], false["proof"], false["digest"]} & {"a" * 64, "b" * 64, "c" * 64}
    twice = json.loads(with_false_hashes(encoded(["a" * 64, "a" * 64]), random.Random(1)))
    assert twice[0] == twice[1]


def test_bombs_are_larger_than_any_document_and_only_one_kind_is_well_formed():
    assert BOMB_BYTES >= MAX_MANIFEST_BYTES
    size = 2**17
    found = {bomb(body_of(SET), random.Random(seed), size) for seed in range(60)}
    assert len(found) == 8
    for one in found:
        assert len(one) > 0.8 * size > DebugReport.max_bytes
    refused = 0
    for one in found:
        try:
            assert parse_untrusted(one, IncludedSet, "bomb") == SET
        except PayloadError:
            refused += 1
    assert refused == 7  # the other is padded with spaces
