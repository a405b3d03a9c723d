"""Records of windows are assembled into columns."""

from synthetic_run import RUN

from tplr.chain import Neuron
from tplr.node.window_time import PHASES
from tplr.page.assemble import assemble
from tplr.page.document import OUTCOMES, Payment, Strike
from tplr.page.history import MinerScore, WindowRecord
from tplr.page.own_events import NodeEvents
from tplr.page.sentences import unpack

NEURONS = [
    Neuron(0, "validators hotkey", "cold", 1e5, True, 0),
    Neuron(1, "a hotkey", "cold", 1.0, False, 0),
    Neuron(2, "another", "cold", 1.0, True, 0),
]


def score(pay: float, *struck: str) -> MinerScore:
    return MinerScore(pay=pay, credit=0.123456, struck=struck, rows=(("weight", f"{pay:.6f}"),))


def document(*records: WindowRecord, events: tuple[NodeEvents, ...] = ()):
    return assemble(RUN, {one.window: one for one in records}, [], NEURONS, events=events)


def test_a_run_without_a_window() -> None:
    empty = document()
    assert (empty.windows.first, empty.windows.count, empty.miners) == (RUN.start_window, 0, ())


def test_columns() -> None:
    payment = Payment(block=99, window=5, weights={1: 1.0})
    found = document(
        WindowRecord(window=5, included=(1,), skipped={2: "too_late"}, tokens=64, held_out=8.00004, payment=payment),
        # Window 6 is unknown.
        WindowRecord(
            window=7,
            included=(2,),
            probation=(1,),
            scores={1: score(0.25), 2: score(0.0, "empty", "strange")},
            payment=payment,
        ),
        WindowRecord(window=8, included=(), unread="sealed"),
    )
    assert (found.windows.first, found.windows.count, found.windows.sealed) == (5, 4, {8: "sealed"})
    assert found.windows.tokens == (64, None, None, None)
    one, two = found.miners
    assert (one.outcomes, two.outcomes) == ("i p.", "l i.")
    assert (one.pay, two.pay) == ((None, None, 0.25, None), (None, None, 0.0, None))
    assert one.credit == (None, None, 0.1235, None)
    assert found.losses.held_out == (8.0, None, None, None)
    assert found.payments == (payment,)
    assert [(strike.uid, strike.rule) for strike in found.strikes] == [(2, "empty"), (2, "strange")]
    assert found.strikes[1] == Strike(window=7, uid=2, rule="strange", meaning="no rule of this version")
    assert unpack(found.explanations, 1, 2) == [("weight", "0.250000")]
    assert unpack(found.explanations, 1, 3) is None
    assert {node.uid: node.role for node in found.nodes} == {1: "miner", 2: "miner"}  # no node reports


def test_who_held_which_model() -> None:
    found = document(
        WindowRecord(window=5, included=(1,), models={0: "aa", 1: "aa", 2: "aa"}),
        WindowRecord(window=6, included=(1,), models={0: "bb", 1: "cc", 2: "bb"}),
        WindowRecord(window=7, included=(1,), models={1: "dd", 2: "ee"}),  # a tie: the smallest text
    )
    assert {node.uid: node.models for node in found.nodes} == {0: "==.", 1: "=x=", 2: "==x"}
    assert {node.uid: node.role for node in found.nodes} == {0: "validator", 1: "miner", 2: "validator"}
    assert found.agreement.fingerprints == ("aa", "bb", "dd")
    assert [one.model_dump() for one in found.agreement.disagreements] == [
        {"window": 6, "models": {"bb": (0, 2), "cc": (1,)}},
        {"window": 7, "models": {"dd": (1,), "ee": (2,)}},
    ]


def test_a_uid_that_changes_hands_is_another_miner() -> None:
    def record(window: int, owner: str | None, **more: object) -> WindowRecord:
        names = {0: "validators hotkey"} | ({} if owner is None else {1: owner})
        fields = {"models": {0: "aa", 1: "aa"}, "electors": {0: 0.75, 1: 0.25}, "commitments": {0: True, 1: True}}
        return WindowRecord.model_validate({"window": window, "included": (1,), "hotkeys": names} | fields | more)

    events = NodeEvents("mine", "miner", 1, training_loss={5: 8.0, 6: 7.5, 9: 7.0})
    found = document(
        record(5, "former", scores={1: score(0.5, "empty")}),
        record(6, None, scores={1: score(0.25)}),
        record(7, "former"),
        record(8, None),
        record(9, "a hotkey", scores={1: score(1.0)}),
        record(10, None),
        events=(events,),
    )
    former, unknown, present = found.miners
    assert [one.hotkey for one in found.miners] == ["former", "", "a hotkey"]
    assert [one.outcomes for one in found.miners] == ["iii---", "---i--", "----ii"]
    assert (former.pay, present.pay) == ((0.5, 0.25, *[None] * 4), (*[None] * 4, 1.0, None))
    assert (former.training_loss, unknown.training_loss) == ((), ())
    assert present.training_loss == (*[None] * 4, 7.0, None)  # of the windows in which it was the owner
    nodes = [(one.hotkey, one.name, one.stake, one.models) for one in found.nodes if one.uid == 1]
    assert nodes[0] == ("former", "", 0.0, "===---")
    assert nodes[2] == ("a hotkey", "mine", 1.0, "----==")
    assert found.elections
    assert [(one.hotkey, one.votes) for one in found.elections.electors[1:]] == [
        ("former", "yyy---"),
        ("", "---y--"),
        ("a hotkey", "----yy"),
    ]
    assert [unpack(found.explanations, 1, at) for at in (0, 4)] == [[("weight", "0.500000")], [("weight", "1.000000")]]


def test_what_operators_know() -> None:
    half = tuple(5.0 if phase in ("training", "saving") else 0.0 for phase in PHASES)
    miner = NodeEvents("miner-1", "miner", 1, training_loss={6: 7.5}, seconds={5: half, 6: half})
    validator = NodeEvents("validator", "validator", 0, held_out={5: 9.0, 6: 8.0})
    records = [WindowRecord(window=5, included=(1,), held_out=8.9), WindowRecord(window=6, included=(1,))]
    found = document(*records, events=(miner, validator))
    [one] = found.miners
    assert (one.training_loss, one.utilisation) == ((None, 7.5), (0.5, 0.5))
    assert sum(one.phases) == 20.0
    assert found.losses.held_out == (8.9, 8.0)  # published values come first
    assert found.time is not None
    assert dict(zip(found.time.phases, found.time.shares, strict=True))["saving"] == (0.5, 0.5)
    assert document(*records).time is None
    assert set("".join(one.outcomes for one in found.miners)) <= set(OUTCOMES)
