"""Event files of the operator's own nodes, while they grow."""

import pytest

from tplr.errors import ConfigError
from tplr.node.window_time import PHASES
from tplr.page.own_events import OwnEvents
from tplr.telemetry import Telemetry
from tplr.telemetry.jsonl import JsonlListener


def test_events_are_read_as_they_come(tmp_path) -> None:
    paths = [tmp_path / "miner-1.jsonl", tmp_path / "validator.jsonl", tmp_path / "silent.jsonl"]
    own = OwnEvents(paths)
    assert own.read() == []
    with JsonlListener(paths[0]) as miner, JsonlListener(paths[1]) as validator:
        emit = Telemetry(role="miner", uid=4, listeners=(miner,)).emit
        emit("trained", window=7, loss=8.5)
        emit("trained", window=8, loss=None)
        emit("window_time", window=7, seconds=2.0, **dict.fromkeys(PHASES, 0.5))
        Telemetry(role="validator", uid=0, listeners=(validator,)).emit("baseline", window=7, held_out_loss=8.4)
        first = {node.name: node for node in own.read()}
        assert set(first) == {"miner-1", "validator"}
        assert (first["miner-1"].uid, first["miner-1"].role) == (4, "miner")
        assert first["miner-1"].training_loss == {7: 8.5}
        assert first["miner-1"].seconds == {7: (0.5,) * len(PHASES)}
        assert first["validator"].held_out == {7: 8.4}
        emit("trained", window=9, loss=8.0)
    assert {node.name: node for node in own.read()}["miner-1"].training_loss == {7: 8.5, 9: 8.0}


def test_events_from_before_a_rotation_count(tmp_path) -> None:
    path = tmp_path / "miner-1.jsonl"
    with JsonlListener(path, max_bytes=250) as listener:
        emit = Telemetry(role="miner", uid=4, listeners=(listener,)).emit
        for window in range(4):
            emit("trained", window=window, loss=8.0)
        own = OwnEvents([path])
        assert list(own.read()[0].training_loss) == [0, 1, 2, 3]
        for window in range(4, 7):
            emit("trained", window=window, loss=8.0)
    assert list(own.read()[0].training_loss) == list(range(7))


@pytest.mark.parametrize(
    "line", ["5", "[]", "{}", '{"event": "trained", "role": "miner", "uid": 1}', '{"first": 1, "agrees": true}']
)
def test_a_file_without_a_nodes_events_is_named(tmp_path, line) -> None:
    path = tmp_path / "audits.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"--read-events .*audits.jsonl: "):
        OwnEvents([path]).read()
