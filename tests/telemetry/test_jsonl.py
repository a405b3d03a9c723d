"""Events in a file: whole lines only, across restarts and kills."""

from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.telemetry import JsonlListener, Telemetry, read_events


def test_events_carry_who_and_when_and_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "events.jsonl"
    assert read_events(path) == ([], 0)
    with JsonlListener(path) as listener:
        telemetry = Telemetry(role="miner", uid=3, listeners=(listener,))
        telemetry.emit("trained", window=7, loss=4.5)
        first, offset = read_events(path)
        telemetry.emit("uploaded", window=7, bytes=10)
        second, offset = read_events(path, offset)
    assert [event["event"] for event in first + second] == ["trained", "uploaded"]
    assert first[0]["loss"] == 4.5
    assert {(event["role"], event["uid"]) for event in first + second} == {("miner", 3)}
    assert read_events(path, offset) == ([], offset)


def test_unfinished_line_waits_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"a"}\n{"event":"b","wi')
    events, offset = read_events(path)
    assert events == [{"event": "a"}]
    with JsonlListener(path) as listener:
        listener({"event": "c"})
    assert read_events(path, offset)[0] == [{"event": "c"}]


def test_rotation_keeps_one_file_and_a_reader_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen: list[int] = []
    offset = 0
    with JsonlListener(path, max_bytes=100) as listener:
        for number in range(50):
            listener({"event": "a", "number": number})
            if number % 2:
                events, offset = read_events(path, offset)
                seen += [event["number"] for event in events]
    assert seen == list(range(50))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())


def test_full_disk_loses_events_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = tmp_path / "events.jsonl"
    full.symlink_to("/dev/full")
    with JsonlListener(full) as listener:
        listener({"event": "a"})
        listener({"event": "b"})
    assert caplog.messages == [f"events are lost: can't write {full}: No space left on device"]


def test_unwritable_place_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a file in a writable folder"):
        JsonlListener(tmp_path / "file" / "events.jsonl")
