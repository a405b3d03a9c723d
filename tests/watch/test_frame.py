"""The text of a frame, as a person reads it."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tplr.page.history import MinerScore, WindowRecord
from tplr.watch.frame import Frame, render_frame
from tplr.watch.own_events import COLUMNS as EVENT_COLUMNS
from tplr.watch.published import COLUMNS, view_of
from tplr.watch.view import Clock, Election, NetworkView

CLOCK = Clock(window=16, block=330, at=1000.0, seconds_left=50.0, block_age=2.0, window_seconds=84.0)


def text_of(frame: Frame, *, now: float = 1010.0, lines: int | None = None) -> str:
    shown = StringIO()
    Console(file=shown, width=140).print(render_frame(frame, now=now, lines=lines))
    return shown.getvalue()


def record(window: int, **changes: object) -> WindowRecord:
    return WindowRecord.model_validate(
        {
            "window": window,
            "included": (2, 3),
            "models": dict.fromkeys((0, 1, 2, 3), "same"),
            "decided": "c",
            "electors": {0: 0.6, 1: 0.4},
            "commitments": {0: True, 1: True},
        }
        | changes
    )


def score(pay: float, credit: float, loss: float | None = None, struck: tuple[str, ...] = ()) -> MinerScore:
    return MinerScore(pay=pay, credit=credit, loss=loss, struck=struck, rows=())


def frame_of(records: list[WindowRecord], owners: dict[int, str] | None = None) -> Frame:
    view = view_of(records, uids=(0, 1, 2, 3, 4), validators=(0, 1), judge=0, owners=owners or {})
    view.clock = CLOCK
    return Frame("templar: finney, netuid 3, version 1", view, COLUMNS)


def test_what_strangers_wrote_commands_no_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e"
    frame = frame_of([record(16, scores={2: score(0.5, 0.1, struck=(hostile,))})]).noting(hostile)
    shown = StringIO()
    Console(file=shown, width=140, force_terminal=True, color_system=None).print(render_frame(frame, now=1010.0))
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.getvalue()}
    assert shown.getvalue().count(r"\x1b]0;owned\x07") == 2


def test_what_strangers_wrote_hides_no_other_line() -> None:
    huge = score(1e308, -1e308, 1e308, struck=("x" * 400,) * 40)
    text = text_of(frame_of([record(16, scores={2: huge}, held_out=1e300)]))
    assert row(text, "miner 2")[5:] == ["1e+308", "1", "of", "1", "-1e+308", "1e+308"]
    assert text.count("x") <= 300
    assert len(text.splitlines()) < 30


def test_a_file_s_name_is_no_markup() -> None:
    frame = replace(frame_of([record(16)]), title="templar: [bold]n.jsonl")
    assert "templar: [bold]n.jsonl" in text_of(frame)


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if f"│ {name} " in line).strip("│ ").split()


def test_a_newcomer_is_not_shown_with_the_former_owner_s_history() -> None:
    before = {"hotkeys": {0: "v", 1: "gone", 2: "former", 3: "miner"}, "skipped": {}}
    records = [
        record(15, scores={2: score(0.75, 0.02, 3.25, ("empty",)), 3: score(0.25, 0.01)}, **before),
        record(16, included=(3,), models={0: "same", 3: "same"}, electors={0: 1.0}, hotkeys={0: "v", 3: "miner"}),
    ]
    text = text_of(frame_of(records, {0: "v", 1: "new", 2: "newcomer", 3: "miner"}))
    assert row(text, "miner 2") == ["miner", "2", "no", "report"]
    assert row(text, "miner 3") == ["miner", "3", "in", "step", "16", "2", "of", "2", "0.0100", "0.250"]
    assert row(text, "validator 1") == ["validator", "1", "no", "report"]
    assert "struck" not in text
    assert "elections: 2 of 2 windows decided, the newest is 16 with 100% of the stake" in text


def test_a_public_run_in_one_frame() -> None:
    records = [
        record(14, scores={2: score(0.75, 0.02, 3.25), 3: score(0.25, 0.01)}, held_out=3.5),
        record(15, included=(2,), skipped={3: "too_late"}, models={0: "b", 1: "b", 2: "b", 3: "other"}),
        record(16, included=None, decided="", commitments={}, models={2: "c"}),
    ]
    text = text_of(frame_of(records))
    assert "window 16, block 330: 40 s left of 84 s" in text
    assert "elections: 2 of 3 windows decided, the newest is 15 with 100% of the stake" in text
    assert "models differ" in text
    assert row(text, "validator 0") == ["validator", "0", "in", "step", "15", "3.500", "60%"]
    assert row(text, "miner 2") == ["miner", "2", "in", "step", "16", "3.250", "2", "of", "2", "0.0200", "0.750"]
    assert row(text, "miner 3") == ["miner", "3", "in", "step", "15", "1", "of", "2", "0.0100", "0.250"]
    assert row(text, "miner 4") == ["miner", "4", "no", "report"]
    assert "miner 3: its model differs from most nodes' after window 15" in text
    assert text.index("validator 0") < text.index("validator 1") < text.index("miner 2") < text.index("miner 3")


def test_problems_of_nodes_are_named() -> None:
    records = [
        record(14, skipped={3: "too_late"}, included=(2,)),
        record(15, decided=""),
        record(16, decided="v", included=(), scores={2: score(0, 0, struck=("wrong_pages",))}, commitments={0: True}),
    ]
    frame = frame_of(records)
    frame.view.nodes["miner 2"].outdated = "the network runs package 9.0, this node 1.0: upgrade it"
    text = text_of(frame.noting("not read: storage is away"))
    assert "miner 3: left out of window 14: too_late" in text
    assert "miner 2: struck in window 16: wrong_pages" in text
    assert "miner 2: the network runs package 9.0, this node 1.0: upgrade it" in text
    assert "the newest is 16 with 60% of the stake; void: 16; not decided: 15" in text
    assert "not read: storage is away" in text


def test_a_node_behind_and_one_on_probation() -> None:
    records = [record(window, models={0: "a", 1: "a"}, probation=(3,)) for window in (12, 13, 14)]
    records[0].models[2] = "a"
    records[2].models[3] = "a"
    nodes = frame_of(records).view.nodes
    assert {name: nodes[name].doing for name in ("miner 2", "miner 3")} == {
        "miner 2": "2 behind",
        "miner 3": "on probation",
    }


def test_nobody_is_accused_where_two_models_have_as_many_nodes() -> None:
    frame = frame_of([record(14, models={0: "a", 1: "a", 2: "b", 3: "b"})])
    assert "models differ" in text_of(frame)
    assert not any(node.problem for node in frame.view.nodes.values())


def test_a_silent_chain_is_said() -> None:
    frame = frame_of([record(14)])
    assert "window 16, block 330: no newer block for 102 s, longer than a window (84 s)" in text_of(frame, now=1100.0)
    assert "no newer block" not in text_of(frame, now=1090.0)  # the next block of an event file may be a little late


def test_a_terminal_shows_as_many_rows_as_fit() -> None:
    text = text_of(frame_of([record(14)]), lines=18)
    assert "and 3 more nodes" in text
    assert "miner 4" not in text


def test_a_network_without_anything_can_be_shown() -> None:
    text = text_of(Frame("templar", NetworkView({}), COLUMNS, notes=("no window is published yet",)))
    assert "no window is known yet" in text
    assert "no window is published yet" in text


def test_a_validators_own_events_show_the_miners_that_it_scores(run) -> None:
    validator = NetworkView({"validator": "validator"})
    validator.update("validator", run.events["validator"])
    validator.nodes["validator"].running = True
    text = text_of(Frame("templar: validator", validator, EVENT_COLUMNS))
    assert row(text, "miner 2")[-2:] == ["0.0200", "0.750"]
    assert "waiting" not in text
    assert "models" not in text  # a single node can't differ


@pytest.mark.parametrize("left", [None, 50.0])
def test_the_time_that_is_left_may_be_unknown(left: float | None) -> None:
    view = NetworkView({})
    view.clock = Clock(window=1, block=20, at=0.0, seconds_left=left, block_age=0.0, window_seconds=84.0)
    view.elections = {0: Election(decided=False)}
    text = text_of(Frame("templar", view, COLUMNS), now=60.0)
    assert ("0 s left of 84 s" in text) == (left is not None)
    assert "none of these windows is decided" in text
