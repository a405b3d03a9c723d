"""The live output of a localnet: lines for a log, and a table that fits a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from tplr.localnet.live import PlainDisplay, open_display, render_summary, render_view
from tplr.localnet.summary import summarize


@pytest.fixture
def console():
    return Console(file=StringIO(), width=80)


def shown(console):
    return console.file.getvalue()


def running(recording):
    view = recording.view()
    for node in view.nodes.values():
        node.running = True
    return view


def test_a_terminal_gets_a_table_and_a_file_gets_lines(run, console):
    terminal = Console(file=StringIO(), width=80, force_terminal=True)
    for one in (console, terminal):
        with open_display(one, 3) as show:
            show(running(run))
    assert "miner-1: running" in shown(console)
    assert "miner-1: running" not in shown(terminal)
    assert "templar localnet" in shown(terminal)


def test_each_completed_window_is_one_line_once(recording, console):
    display = PlainDisplay(console, 3)
    display.show(running(recording))
    recording.window(1)
    recording.window(2, skip=["miner-2"])
    display.show(running(recording))
    display.show(running(recording))
    recording.window(2, skip=["miner-1", "validator"])
    recording.window(3, fingerprints={"miner-1": "f" * 64})
    display.show(running(recording))
    assert [line for line in shown(console).splitlines() if line.startswith("window")] == [
        "window 7 (1 of 3): training loss 7.900 7.900, held-out pages 7.800, gathered 2 of 2, models equal",
        "window 8 (2 of 3): training loss 7.700 7.700, held-out pages 7.600, gathered 2 of 2, models equal",
        "window 9 (3 of 3): training loss 7.500 7.500, held-out pages 7.400, gathered 2 of 2, models differ",
    ]


def test_a_line_is_printed_when_a_node_ends_or_has_a_problem(run, console):
    display = PlainDisplay(console, 10)
    view = running(run)
    display.show(view)
    view.nodes["miner-1"].running = False
    view.nodes["miner-2"].update({"event": "problem", "text": "state not saved [disk full]"})
    display.show(view)
    display.show(view)
    lines = shown(console).splitlines()
    assert lines[-2:] == ["miner-1: down", "miner-2: state not saved [disk full]"]


def test_the_live_table_has_a_row_for_each_node(run, console):
    view = running(run)
    view.nodes["miner-2"].running = False
    view.nodes["miner-2"].problem = "window 9 missed: [too] late"
    console.print(render_view(view, 12))
    text = shown(console)
    assert "…" not in text  # nothing was cut off
    row = next(line for line in text.splitlines() if "miner-1" in line)
    assert row.strip("│ ").split() == [
        "miner-1",
        "next",
        "window",
        "1",
        "16",
        "6.100",
        "2",
        "of",
        "2",
        "30.0",
        "0.1000",
        "0.250",
    ]
    assert "down" in next(line for line in text.splitlines() if "miner-2 " in line)
    assert "miner-2: window 9 missed: [too] late" in text
    assert "10 of 12 windows" in text
    assert "models equal" in text


def test_differing_models_are_seen_at_once(run, console):
    run.window(11, fingerprints={"miner-2": "f" * 64})
    console.print(render_view(run.view(), 12))
    assert "models differ" in shown(console)


def test_a_network_that_has_not_begun_can_be_shown(recording, console):
    console.print(render_view(recording.view(), 3))
    console.print(render_summary(summarize(recording.view(), {}, windows=3)))
    assert "waiting for the first window" in shown(console)


def test_the_summary_ends_with_an_advice_if_there_is_one(run, console):
    for window in (8, 9):
        run.emit("miner-1", "missed", window=window, reason="not ready")
    console.print(render_summary(summarize(run.view(), {0: {1: 1.0}}, windows=10, window_seconds=8.0)))
    assert "note    miners missed 2 of 20 windows" in shown(console)


def test_the_summary_has_figures_and_verdicts(run, console):
    console.print(render_summary(summarize(run.view(), {0: {1: 1.0}}, windows=10)))
    text = shown(console)
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.startswith("miner-1"))
    assert row.split() == [
        "miner-1",
        "1",
        "7.700",
        "→",
        "6.300",
        "-18.2",
        "%",
        "10",
        "0",
        "10",
        "30.0",
        "2.00",
        "0.1000",
        "1.000",
    ]
    assert "FAILED  no positive weight on chain: miner-2" in text
    assert "ok      10 of 10 windows completed by all nodes" in text
