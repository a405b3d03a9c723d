"""The assignment of a store's sequences: shares against plain sets, over whole epochs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import DataError
from tplr.seeds import held_out_samples_seed, samples_seed
from tplr.stores.sequences import SequenceAssignment, samples_digest


def shares(sequences: int, samples: int, uids: int, order: str = "store") -> SequenceAssignment:
    return SequenceAssignment(sequences=sequences, order=order, samples_per_window=samples, uids=uids)


def seed(window: int) -> int:
    return samples_seed("hardened", window=window, block_hash=f"0x{window}")


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.integers(0, 3))
@settings(max_examples=40)
def test_no_sequence_twice_in_an_epoch_and_all_uids_apart(samples: int, uids: int, more: int, epoch: int) -> None:
    rule = shares(samples * uids + more, samples, uids)
    assert rule.windows == (samples * uids + more) // (samples * uids)
    windows = range(epoch * rule.windows, (epoch + 1) * rule.windows)
    assigned = [rule.of(uid, window, seed(window)) for window in windows for uid in range(uids)]
    assert all(len(share) == samples for share in assigned)
    used = [sequence for share in assigned for sequence in share]
    assert len(used) == len({*used}) == rule.windows * samples * uids
    assert {*used} <= {*range(rule.sequences)}
    assert rule.of(uids, windows[0], 1) == []


def test_whose_is_which_follows_from_the_blocks_hash() -> None:
    rule = shares(4096, 8, 16)
    known, other = [rule.of(3, 5, samples_seed("hardened", window=5, block_hash=block)) for block in ("0xa", "0xb")]
    assert known != other
    pool = {sequence for uid in range(16) for sequence in rule.of(uid, 5, 1)}
    assert {*known, *other} <= pool  # and the pool does not
    assert rule.of(3, 5, 1) != rule.of(3, 5 + rule.windows, 1)  # the next epoch has another order
    assert shares(4096, 8, 16, "another").of(3, 5, 1) != rule.of(3, 5, 1)
    assert samples_seed("documented", window=5, block_hash="0xa") == samples_seed("documented", window=5, block_hash="")


def test_the_written_rule_stays() -> None:
    assert shares(1000, 3, 4).of(2, 90, seed(90)) == [66, 198, 291]
    assert samples_digest([66, 198, 291], "5" * 64, 128)[:16] == "0fadaabfef602ee9"


def test_control_sequences_are_nobodys_who_is_measured() -> None:
    rule = shares(64, 4, 8)
    taken = {sequence for uid in range(8) for sequence in rule.of(uid, 0, 7)}
    found = rule.held_out(held_out_samples_seed(hotkey="5F", block_hash="0xa"), taken)
    assert len({*found}) == 4
    assert not {*found} & taken
    assert found == rule.held_out(held_out_samples_seed(hotkey="5F", block_hash="0xa"), taken)
    assert found != rule.held_out(held_out_samples_seed(hotkey="5G", block_hash="0xa"), taken)
    with pytest.raises(DataError, match="only 3 sequences are not assigned"):
        rule.held_out(1, range(61))


def test_a_store_too_small_for_a_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"31 sequences, a window of 8 uids with 4 each takes 32: use a larger store"):
        shares(31, 4, 8)


def test_digests_tell_versions_lengths_and_orders_apart() -> None:
    given = {
        samples_digest(sequences, sha256, length)
        for sequences in ([1, 23], [12, 3], [23, 1])
        for sha256 in ("a", "b")
        for length in (8, 16)
    }
    assert len(given) == 12
