"""Events in a file: whole lines only, across restarts and kills."""

from pathlib import Path

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
