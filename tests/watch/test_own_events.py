"""``tplr watch --events``: a node's own file, written by the code that nodes use."""

from pathlib import Path

import pytest
from guides import from_guide
from network_events import Recording

from tplr.cli import main
from tplr.errors import ConfigError
from tplr.telemetry import Telemetry
from tplr.telemetry.jsonl import JsonlListener
from tplr.watch.own_events import EventsSource


def write(path: Path, recording: Recording, name: str) -> None:
    with JsonlListener(path) as listener:
        for event in recording.events[name]:
            listener(event)


def test_one_frame_of_a_miner(run: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "miner-1.jsonl"
    run.emit("miner-1", "missed", window=17, cause="late", reason="the upload came 3 s too late")
    write(path, run, "miner-1")
    with JsonlListener(path) as listener:
        told = Telemetry(role="miner", uid=1, listeners=(listener,))
        told.emit(
            "pulse", window=17, block=72, block_age=0.0, seconds_left=8.0, window_seconds=10.0, free_bytes=1,
            storage_requests={}, gpus={},
        )  # fmt: skip
        told.emit(
            "outdated", window=17, text="from window 20 on, the network follows version 2 of the rules", since=20,
            package="1.0", network_package="2.0", spec_version=1, network_spec_version=2,
        )  # fmt: skip
    # The first one follows the file until it is ended.
    for command, more in (
        (from_guide("docs/monitoring.md", "tplr watch --events miner.jsonl", {"miner.jsonl": path}), ["--once"]),
        (from_guide("docs/monitoring.md", "tplr watch --once --events miner.jsonl", {"miner.jsonl": path}), []),
    ):
        assert main([*command.arguments, *more]) == 0
        text = capsys.readouterr().out
        assert "templar: miner-1" in text
    assert "window 17, block 72: " in text
    assert "s left of 10 s" in text
    assert "6.100" in text  # its loss
    assert "miner-1: window 17 missed: the upload came 3 s too late" in text
    assert "miner-1: from window 20 on, the network follows version 2 of the rules" in text


async def test_a_frame_follows_the_file_also_when_it_is_rotated(run: Recording, tmp_path: Path) -> None:
    path = tmp_path / "miner-1.jsonl"
    most = 22  # events of seven windows; the file that follows is shorter
    with JsonlListener(path) as listener:
        for event in run.events["miner-1"][:most]:
            listener(event)
        source = EventsSource(path)
        before = (await source.look()).view.nodes["miner-1"]
        seen = before.window
        path.replace(path.with_name("miner-1.jsonl.1"))
    with JsonlListener(path) as listener:
        for event in run.events["miner-1"][most:]:
            listener(event)
    after = (await source.look()).view.nodes["miner-1"]
    assert (seen, after.window) == (13, 16)
    # A watch that starts now sees both files.
    whole = (await EventsSource(path).look()).view.nodes["miner-1"]
    assert len(whole.applied) == 10


async def test_a_restarted_node_is_not_called_old_any_more(run: Recording, tmp_path: Path) -> None:
    path = tmp_path / "miner-1.jsonl"
    run.emit("miner-1", "outdated", window=17, text="upgrade it")
    run.emit("miner-1", "started", version="2", window=18)
    write(path, run, "miner-1")
    assert (await EventsSource(path).look()).view.nodes["miner-1"].outdated == ""


async def test_an_empty_file_has_no_events_yet(tmp_path: Path) -> None:
    path = tmp_path / "miner.jsonl"
    path.touch()
    frame = await EventsSource(path).look()
    assert frame.notes == (f"{path} holds no events yet",)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ('{"event": "x"}\n', "not the events of a node"), ("[1]\n", "not the events of a node")],
)
def test_what_is_no_event_file_is_refused_in_one_line(
    content: str | None, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["watch", "--once", "--events", str(path)]) == 2
    told = capfd.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


async def test_a_damaged_event_is_refused(run: Recording, tmp_path: Path) -> None:
    path = tmp_path / "miner-1.jsonl"
    write(path, run, "miner-1")
    source = EventsSource(path)
    await source.look()
    with path.open("a") as file:
        file.write('{"event": "applied", "role": "miner", "uid": 1, "time": 1}\n')
    line = len(path.read_text().splitlines())
    with pytest.raises(ConfigError, match=f"--events {path} line {line}: a damaged event: no field 'window'"):
        await source.look()


def test_a_folder_is_no_event_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file"):
        EventsSource(tmp_path)


def test_a_file_and_a_network_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["watch", "--events", str(tmp_path / "x"), "--local"])
    assert end.value.code == 2
    assert "--events shows one node from its file" in capsys.readouterr().err
