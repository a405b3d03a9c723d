"""Events in the log: short, with role and window in every line, and no duplicate lines."""

import json
import logging

import pytest

from tplr.logging import TRACE, in_window, name_node, setup_logging, take_over
from tplr.telemetry import Telemetry, log_event


@pytest.fixture
def telemetry() -> Telemetry:
    name_node("miner 3")
    return Telemetry(role="miner", uid=3, listeners=(log_event,))


def emit_all(telemetry: Telemetry) -> None:
    with in_window(7):
        telemetry.emit("trained", window=7, loss=4.123456, batches=9)
        telemetry.emit("applied", window=7, fingerprint="ab" * 32, skipped={"5": "missing"})
        telemetry.emit("evaluated", window=7, peer=5)
        telemetry.emit("missed", window=7, reason="said by whoever emits it")
    telemetry.emit("stopped")


def test_lines(telemetry: Telemetry, capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    emit_all(telemetry)
    lines = [line.split(maxsplit=2)[2] for line in capfd.readouterr().err.splitlines()]
    assert lines == [
        "miner 3 w7         trained: loss 4.123, batches 9",
        "miner 3 w7         applied: fingerprint abababababab…, skipped {5: missing}",
        "miner 3            stopped",
    ]


def test_levels(telemetry: Telemetry, capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging(debug=True)
    emit_all(telemetry)
    logging.getLogger("tplr").log(TRACE, "a request")
    debug = capfd.readouterr().err
    setup_logging(trace=True)
    logging.getLogger("tplr").log(TRACE, "a request")
    logging.getLogger("botocore").debug("signed headers")
    trace = capfd.readouterr().err
    assert "evaluated: peer 5" in debug
    assert "a request" not in debug
    assert "a request" in trace
    assert "signed headers" not in trace


def test_json_lines_hold_node_window_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(json_lines=True)
    name_node("miner 3")
    with in_window(7):
        logging.getLogger("tplr").info("two\nlines")
    try:
        raise ValueError("out of range")
    except ValueError:
        logging.getLogger("tplr").exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["node"], first["window"], first["level"], first["message"]) == ("miner 3", 7, "info", "two\nlines")
    assert (second["window"], second["level"]) == (None, "error")
    assert "ValueError: out of range" in second["traceback"]


@pytest.mark.parametrize("propagates", [True, False])
def test_a_library_with_a_handler_of_its_own_is_heard_once(
    capsys: pytest.CaptureFixture[str], propagates: bool
) -> None:
    library = logging.getLogger("some_hub")
    library.addHandler(logging.StreamHandler())
    library.propagate = propagates
    setup_logging(json_lines=True)
    take_over("some_hub")
    logging.getLogger("some_hub.requests").warning("refused: retrying")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "refused: retrying"
