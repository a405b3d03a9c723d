"""Events in a file: only whole lines, across restarts and kills."""

import os
import resource
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.telemetry import JsonlListener, Telemetry, read_events
from tplr.telemetry.jsonl import START, rotated


def test_events_carry_who_and_when_and_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "events.jsonl"
    assert read_events(path) == ([], START)
    with JsonlListener(path) as listener:
        telemetry = Telemetry(role="miner", uid=3, listeners=(listener,))
        telemetry.emit("trained", window=7, loss=4.5)
        first, position = read_events(path)
        telemetry.emit("uploaded", window=7, bytes=10)
        second, position = read_events(path, position)
    assert [event["event"] for event in first + second] == ["trained", "uploaded"]
    assert first[0]["loss"] == 4.5
    assert {(event["role"], event["uid"]) for event in first + second} == {("miner", 3)}
    assert read_events(path, position) == ([], position)


def test_unfinished_line_waits_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"a"}\n{"event":"b","wi')
    events, position = read_events(path)
    assert events == [{"event": "a"}]
    with JsonlListener(path) as listener:
        listener({"event": "c"})
    assert read_events(path, position)[0] == [{"event": "c"}]


def test_rotation_keeps_one_file_and_a_reader_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen: list[int] = []
    position = START
    with JsonlListener(path, max_bytes=100) as listener:
        for number in range(50):
            listener({"event": "a", "number": number})
            if number % 2:
                events, position = read_events(path, position)
                seen += [event["number"] for event in events]
    assert seen == list(range(50))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())


@pytest.mark.parametrize("length", [1, 5, 9])
@pytest.mark.parametrize("again", [False, True])
def test_a_rotation_is_noticed_whatever_the_length_of_the_new_file(tmp_path: Path, length: int, again: bool) -> None:
    path = tmp_path / "events.jsonl"

    def write(*numbers: int) -> None:
        with JsonlListener(path) as listener:
            for number in numbers:
                listener({"event": "a", "number": number})

    write(0, 1, 2, 3, 4)
    events, position = read_events(path)
    write(5)
    path.replace(rotated(path))
    write(*range(6, 6 + length))
    if again:  # and another rotation since: the first file's content is gone, also if its inode is reused
        path.replace(rotated(path))
        write(*range(20, 20 + length))
        position = position._replace(file=position.file and (position.file[0], path.stat().st_ino, position.file[2]))
    found, position = read_events(path, position)
    expected = [*range(6, 6 + length), *range(20, 20 + length)] if again else [5, *range(6, 6 + length)]
    assert [event["number"] for event in found] == expected
    assert read_events(path, position) == ([], position)
    assert len(events) == 5


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


def test_a_file_that_was_moved_away_is_written_again(tmp_path: Path) -> None:
    """At the next rotation; until then events are in the file that was moved, as with every open file."""
    path = tmp_path / "events.jsonl"
    with JsonlListener(path, max_bytes=100) as listener:
        listener({"event": "a", "number": 0})
        path.replace(tmp_path / "kept.jsonl")
        for number in range(1, 10):
            listener({"event": "a", "number": number})
    files = (tmp_path / "kept.jsonl", rotated(path), path)
    assert [event["number"] for file in files for event in read_events(file)[0]] == list(range(10))


def test_a_file_that_can_not_be_opened_again_costs_events_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as on a disk without a free inode."""
    path = tmp_path / "events.jsonl"
    with JsonlListener(path, max_bytes=30) as listener:
        listener({"event": "a", "number": 0})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda *_, **__: os.close(os.open("/nowhere", os.O_RDONLY)))
            listener({"event": "a", "number": 1})
            listener({"event": "a", "number": 2})
        listener({"event": "a", "number": 3})
    assert caplog.messages == [f"events are lost: can't write {path}: No such file or directory"]
    assert [event["number"] for event in read_events(path)[0]] == [3]


def test_an_event_of_which_a_part_was_written_does_not_take_the_next_one_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonlListener(path) as listener:
        listener({"event": "a", "number": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
        try:
            listener({"event": "a", "number": 1})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [text for text in caplog.messages if "events are lost" in text]
        listener({"event": "a", "number": 2})
    assert [event["number"] for event in read_events(path)[0]] == [0, 2]
