"""Events reach every listener, each as one record."""

from typing import Any

from tplr.telemetry import Telemetry


def test_every_listener_gets_each_event_with_the_nodes_fields() -> None:
    first: list[Any] = []
    second: list[Any] = []
    telemetry = Telemetry(role="miner", uid=3, listeners=(first.append, second.append))
    telemetry.emit("uploaded", window=7, bytes=10)
    telemetry.emit("stopped")
    assert first == second
    assert [sorted(event) for event in first] == [
        ["bytes", "event", "role", "time", "uid", "window"],
        ["event", "role", "time", "uid"],
    ]
    assert (first[0]["event"], first[0]["role"], first[0]["uid"], first[0]["window"]) == ("uploaded", "miner", 3, 7)
    assert first[0]["time"] <= first[1]["time"]
