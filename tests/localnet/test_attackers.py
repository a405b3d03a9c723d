"""The updates of the simulation's attackers, and a validator's view of them."""

import asyncio

import numpy as np
import pytest
import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import build, parse
from tplr.compress.topk import select
from tplr.keys import commit_key, debug_key
from tplr.localnet.attackers import (
    Copier,
    Dealt,
    Dormant,
    GoDark,
    HalfAbsent,
    HidingTurncoat,
    Honest,
    InTurns,
    Late,
    Lossy,
    Noise,
    NoProof,
    OthersPages,
    OutOfSync,
    PagesOverfitter,
    PeriodicTurncoat,
    Repeater,
    Scaled,
    Timed,
    Turncoat,
    Twin,
    WrongPages,
    Zeros,
)
from tplr.localnet.attackers.pages import OVERFIT_NORM
from tplr.localnet.attackers.values import noise_like
from tplr.localnet.simulation import Member, World, profile, small
from tplr.schemas import OUT_OF_SYNC, DebugReport
from tplr.training.loss import mean_loss

WINDOWS = 4


def members() -> list[Member]:
    """Return new members, because some remember their updates."""
    return [
        Honest(8),
        GoDark("go dark", 8, last=2),
        Timed("timed", 8, "poison"),
        Noise("noise", 3.0),
        Zeros("zeros"),
        Twin("twin", 6, 8),
        Twin("twin", 6, 8),
        Twin("near twin", 6, 8, own_indices=0.25),
        HalfAbsent("half absent", 8),
        Lossy(8, {2}),
        Late("late", 8),
        OutOfSync("out of sync", 8),
        NoProof("no proof", 8),
        WrongPages("wrong pages", 8),
        Scaled("scaled", 8, 10.0),
        Repeater("repeater", 8),
        Turncoat("turncoat", 8, last=2),
        HidingTurncoat("hiding", 8, last=2, harmful=1, period=2),
        Dormant("dormant", 8, last=1),
        OthersPages("others' pages", 24, own=8),
        dealer := Dealt("dealt", 16, DEALT),
        Dealt("dealt", 16, DEALT, dealer),
        in_turns := InTurns("in turns", 16, TURNS, at_once=2),
        *(InTurns("in turns", 16, TURNS, at_once=2, first=in_turns) for _ in TURNS[1:]),
    ]


DEALT = (21, 22)
TURNS = (23, 24, 25)  # the last uids
UID = {member.name: uid for uid, member in enumerate(members(), start=1)}
HONEST, TWIN, OTHER_TWIN, LOSSY = 1, 6, 7, 10


@pytest.fixture(scope="module", params=["demo", pytest.param("sparseloco", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest) -> World:
    hparams = small(profile(request.param), pages_per_window=2, evaluation_sequences=16, uids_per_window=2)
    # The dormant miner sends in two of three windows after its first one.
    hparams = hparams.model_copy(update={"peer_replacement_frequency": 50, "pay_windows": 3})
    world = World(hparams, members(), measures_loss=False)
    asyncio.run(world.run(WINDOWS))
    return world


def verdicts(world: World, uid: int) -> list[str | None]:
    return [record.seen.observations[uid].verdict for record in world.records]


def test_who_is_there_is_valid_and_who_is_not_is_not(world: World) -> None:
    assert verdicts(world, HONEST) == ["valid"] * WINDOWS
    assert verdicts(world, UID["go dark"]) == ["valid", "valid", "unavailable", "unavailable"]
    assert verdicts(world, UID["half absent"]) == ["valid", "missing"] * 2
    assert verdicts(world, LOSSY) == ["valid", "missing", "valid", "valid"]
    assert verdicts(world, UID["late"]) == ["too_late"] * WINDOWS
    assert verdicts(world, UID["dormant"]) == ["valid", "too_late", "valid", "valid"]
    assert verdicts(world, UID["zeros"]) == ["empty"] * WINDOWS


def test_a_periodic_turncoat_harms_in_a_part_of_each_period() -> None:
    periodic = PeriodicTurncoat("periodic", 8, last=2, harmful=2, period=5)
    assert [window for window in range(1, 15) if periodic.harms(window)] == [3, 4, 8, 9, 13, 14]
    assert [window for window in range(1, 5) if Turncoat("turncoat", 8, last=2).harms(window)] == [3, 4]


def test_twins_send_one_update_and_leave_no_commit(world: World) -> None:
    one, other = world.updates[TWIN], world.updates[OTHER_TWIN]
    for name in world.spec.tensors:
        for mine, theirs in zip(one.coefficients(name), other.coefficients(name), strict=True):
            assert torch.equal(mine, theirs)
    for uid in (TWIN, OTHER_TWIN):
        keys = world.by_uid[uid].store._objects
        assert commit_key(WINDOWS, uid, world.hparams.version) not in keys
    assert commit_key(WINDOWS, HONEST, world.hparams.version) in world.by_uid[HONEST].store._objects


def test_dealt_parts_are_of_one_work_on_pages_of_both_uids(world: World) -> None:
    first, second = (world.by_uid[uid] for uid in DEALT)
    assert isinstance(first, Dealt)
    assert first.outer is second.outer
    pages = [world.pages(uid, WINDOWS).batches[:1].reshape(8, -1) for uid in DEALT]
    assert np.array_equal(first.batches(world, WINDOWS).reshape(16, -1), np.concatenate(pages))
    shared = total = 0
    for name, tensor in world.spec.tensors.items():
        if not tensor.dense:
            one, other = (world.updates[uid].coefficients(name)[0] for uid in DEALT)
            shared += sum(len(np.intersect1d(a, b)) for a, b in zip(one.numpy(), other.numpy(), strict=True))
            total += one.numel()
    assert total > 0
    assert shared < 0.2 * total  # the next largest entries, and few of the first ones a second time


def test_uids_in_turns_send_one_work_on_pages_of_those_whose_turn_it_is(world: World) -> None:
    members = [one for one in world.by_uid.values() if isinstance(one, InTurns)]
    assert [one.uid for one in members] == [*TURNS]
    for window in range(1, WINDOWS + 1):
        assert [one.uid for one in members if window in one.uploaded] == members[0].turn(window)
    assert {len(one.uploaded) for one in members} != {WINDOWS}
    first, second = members[0].turn(WINDOWS)
    pages = [world.pages(uid, WINDOWS).batches[:1].reshape(8, -1) for uid in (first, second)]
    assert np.array_equal(members[0].batches(world, WINDOWS).reshape(16, -1), np.concatenate(pages))
    for name in world.spec.tensors:
        for mine, theirs in zip(*(world.updates[uid].coefficients(name) for uid in (first, second)), strict=True):
            assert torch.equal(mine, theirs)


def test_a_near_twin_shares_three_quarters_of_the_coordinates(world: World) -> None:
    one, other = world.updates[TWIN], world.updates[UID["near twin"]]
    for name, tensor in world.spec.tensors.items():
        if tensor.dense or tensor.k < 8:
            continue
        mine, theirs = (each.coefficients(name)[0].tolist() for each in (one, other))
        shared = [len({*a} & {*b}) / tensor.k for a, b in zip(mine, theirs, strict=True)]
        assert min(shared) == max(shared) == pytest.approx(0.75, abs=0.5 / tensor.k)


def test_noise_has_three_times_the_values_of_uid_1_and_the_scaled_update_ten_times_its_own(world: World) -> None:
    last = world.records[-1].seen.alignment
    assert last is not None
    norms = dict(zip(last.uids, last.norms, strict=True))
    # The encoding rounds values to a codebook.
    assert norms[UID["noise"]] == pytest.approx(3 * norms[HONEST], rel=0.3)
    assert norms[UID["scaled"]] > 3 * norms[HONEST]


def test_poison_points_away_from_the_gradient(world: World) -> None:
    """After a window in which it was sampled, the timed miner does not work."""
    member = world.by_uid[UID["timed"]]
    assert isinstance(member, Timed)
    products = []
    for record in world.records:
        found = record.seen.alignment
        assert found is not None
        if record.window not in member.worked:
            products.append(found.products[found.uids.index(member.uid)])
    assert member.worked[0] == 1
    assert all(product < 0 for product in products)


def test_a_turncoat_helps_at_first_and_harms_at_last(world: World) -> None:
    products = []
    for record in world.records:
        found = record.seen.alignment
        assert found is not None
        products.append(found.products[found.uids.index(UID["turncoat"])])
    assert products[0] > 0 > products[-1]


def test_a_hiding_turncoat_names_other_pages_where_it_harms(world: World) -> None:
    uid = UID["hiding"]
    assert [record.seen.observations[uid].assigned_pages for record in world.records] == [True, True, False, True]
    measured = [record.seen.alignment.uids for record in world.records if record.seen.alignment]
    assert [uid in uids for uids in measured] == [True, True, False, True]


def test_another_model_is_seen_whether_it_is_proven_or_not(world: World) -> None:
    last = world.records[-1].seen.observations
    assert last[HONEST].behind == 0
    assert last[UID["out of sync"]].behind == last[UID["no proof"]].behind == OUT_OF_SYNC
    size = world.by_uid[UID["no proof"]].store._objects[debug_key(1, UID["no proof"], world.hparams.version)][0].size
    assert size > DebugReport.max_bytes


def test_wrong_pages_name_the_assigned_ones(world: World) -> None:
    uid = UID["wrong pages"]
    assert world.records[-1].seen.observations[uid].assigned_pages is True
    member = world.by_uid[uid]
    assert isinstance(member, WrongPages)
    assert not (member.batches(world, 1).reshape(-1) == world.pages(uid, 1).batches.reshape(-1)[:512]).all()


def test_a_reader_of_others_pages_has_its_own_part_and_single_sequences_of_others(world: World) -> None:
    member = world.by_uid[UID["others' pages"]]
    assert isinstance(member, OthersPages)
    own = world.pages(member.uid, 1).batches.reshape(16, -1)
    found = member.batches(world, 1).reshape(24, -1)
    assert (found[:8] == own[:8]).all()
    readers = [
        {uid for uid in world.by_uid if (one == world.pages(uid, 1).batches.reshape(16, -1)).all(axis=1).any()}
        for one in found[8:]
    ]
    assert all(len(uids) == 1 and member.uid not in uids for uids in readers)
    assert len(set().union(*readers)) == 16
    control = OthersPages("other pages", 24, own=8, assigned=False)
    control.uid = member.uid
    assert (control.batches(world, 1).reshape(24, -1)[:8] == own[:8]).all()
    everybody = np.concatenate([world.pages(uid, 1).batches.reshape(16, -1) for uid in world.by_uid])
    assert not any((one == everybody).all(axis=1).any() for one in control.batches(world, 1).reshape(24, -1)[8:])


def test_a_sibling_reads_its_owner_s_pages_alone_and_an_overfitter_gains_on_what_it_reads(world: World) -> None:
    member = world.by_uid[UID["others' pages"]]
    sibling = OthersPages("sibling", 24, own=8, whose=(HONEST, TWIN, member.uid))
    overfitter = PagesOverfitter("overfitter", 24, own=8)
    sibling.uid = overfitter.uid = member.uid
    owned = np.concatenate([world.pages(uid, 1).batches.reshape(16, -1) for uid in (HONEST, TWIN)])
    assert all((one == owned).all(axis=1).any() for one in sibling.sequences(world, 1)[8:])
    overfitter.train_state = world.train_state
    before = {name: one.clone() for name, one in world.train_state.model.named_parameters()}
    read = overfitter.sequences(world, 1)
    change = overfitter.tensors(world, 1)
    for name, one in world.train_state.model.named_parameters():
        assert torch.equal(one, before[name])  # the network's model is as it was
    loss = mean_loss(world.train_state.model, read[None], world.hparams.precision)
    with torch.no_grad():
        for name, one in world.train_state.model.named_parameters():
            one.sub_(change[name] / OVERFIT_NORM)
        overfitted = mean_loss(world.train_state.model, read[None], world.hparams.precision)
        for name, one in world.train_state.model.named_parameters():
            one.copy_(before[name])
    assert overfitted < loss - 0.1


def test_where_a_group_sends_one_entry_a_copy_and_noise_do_too() -> None:
    spec = PayloadSpec.of({"a": (64, 128)}, outer="sparseloco", target_chunk=64, topk=128, bits=1, selection="group")
    meta = {"window": 1, "uid": 2, "pages_digest": "0" * 64, "batches": 1}
    indices, values = select(torch.randn(2, 64 * 64, generator=torch.Generator().manual_seed(3)), 128, grouped=True)
    stolen = parse(build({"a": (indices, values)}, spec, **meta), spec, window=1, uid=2)
    thief = Copier("thief", 2, own_indices=0.25)
    thief.uid = 3
    copied, noise = thief._changed(stolen, 1), noise_like(stolen, 1.0, 4)
    for made in (copied, noise):  # an index of another group could not be built
        assert len(build(made, spec, **meta)) == spec.expected_size
    assert (copied["a"][0] == indices).sum(dim=1).tolist() == [96, 96]
    assert (noise["a"][0] != indices).any()
