"""A node's conclusions from the software versions that validators report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from types import SimpleNamespace
from typing import Any

import pytest

from tplr.errors import ObjectNotFound, Outdated, PayloadError, StoreUnavailable
from tplr.keys import RunVersion
from tplr.node.software import SoftwareWatch, own_software
from tplr.schemas import Software
from tplr.telemetry import Telemetry

OLD, NEW = RunVersion("1"), RunVersion("1", [(20, "2")])
STAKES = {0: 50.0, 1: 30.0, 2: 20.0}


@dataclass
class Directory:
    """Stakes on chain, and one document or error for each validator."""

    documents: dict[int, Software | Exception]
    uid: int = 9
    puts: list[Software] = field(default_factory=list)
    failing_puts: int = 0

    @property
    def metagraph(self) -> Any:
        neurons = [
            SimpleNamespace(uid=uid, hotkey=f"hotkey {uid}", stake=stake, permit=uid != self.uid)
            for uid, stake in (STAKES | {self.uid: 1e6}).items()
        ]
        return SimpleNamespace(neurons=neurons)

    def validators(self) -> list[int]:
        return list(STAKES)

    async def get_software(self, uid: int) -> Software:
        found = self.documents.get(uid, ObjectNotFound("none"))
        if isinstance(found, Exception):
            raise found
        return found

    async def put_software(self, software: Software) -> None:
        if self.failing_puts:
            self.failing_puts -= 1
            raise StoreUnavailable("down")
        self.puts.append(software)


def software(uid: int, *, package: str = package_version("tplr"), spec: int = 1, since: int = 0) -> Software:
    return Software(uid=uid, package=package, spec_version=spec, since=since)


async def watch(
    directory: Directory, windows: range, version: RunVersion = OLD, before: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run over ``windows``, each after a call of ``before``; returns the events."""
    events: list[dict[str, Any]] = []

    async def ticks() -> Any:
        for window in windows:
            before(window)
            yield SimpleNamespace(window=window, missed=0)

    context: Any = SimpleNamespace(
        comms=directory,
        clock=SimpleNamespace(ticks=ticks),
        telemetry=Telemetry(role="miner", uid=9, listeners=(lambda event: events.append(dict(event)),)),
    )
    await SoftwareWatch(context, version).run()
    return events


async def test_it_publishes_its_own_until_the_bucket_takes_it() -> None:
    directory = Directory({}, failing_puts=2)
    await watch(directory, range(5), NEW)
    assert directory.puts == [own_software(9, NEW)]
    assert (directory.puts[0].spec_version, directory.puts[0].since) == (2, 20)


async def test_an_announced_change_is_said_once_and_then_stops_the_node() -> None:
    directory = Directory({0: software(0, spec=2, since=20), 1: software(1, spec=2, since=20)})
    events = await watch(directory, range(10, 20))
    assert [(one["event"], one["since"], one["network_spec_version"]) for one in events] == [("outdated", 20, 2)]
    with pytest.raises(Outdated, match="from window 20 on, the network follows version 2"):
        await watch(directory, range(18, 25))
    assert await watch(directory, range(18, 25), NEW) == []


async def test_an_announced_change_that_is_withdrawn_is_forgotten() -> None:
    announced, without = software(0, spec=2, since=60), software(0)
    directory = Directory({0: announced, 1: software(1, spec=2, since=60), 2: software(2)})
    found: dict[int, Software | Exception] = {7: StoreUnavailable("down"), 12: announced, 17: without, 22: announced}

    def turn(window: int) -> None:
        directory.documents[0] = found.get(window, directory.documents[0])

    events = await watch(directory, range(30), before=turn)
    # The answer of a bucket that is down is the last one that it gave.
    assert [(one["window"], one["since"], bool(one["text"])) for one in events] == [
        (0, 60, True),
        (20, 0, False),
        (25, 60, True),
    ]


async def test_half_of_the_stake_does_not_stop_anybody() -> None:
    announced: dict[int, Software | Exception] = {0: software(0, spec=2, since=0)}  # 50 of 100
    assert await watch(Directory(announced), range(30, 40)) == []
    with pytest.raises(Outdated):
        await watch(Directory(announced | {2: software(2, spec=3, since=5)}), range(30, 40))


@pytest.mark.parametrize("claim", [{"spec": 2, "since": 0}, {"spec": 3, "since": 0}, {"spec": 2, "since": 2**40}])
async def test_the_window_of_an_announced_change_is_that_of_the_majority(claim: dict[str, int]) -> None:
    """No validator with less than half of the stake can move it, or choose the text."""
    announced: dict[int, Software | Exception] = {uid: software(uid, spec=2, since=20) for uid in (0, 1)}
    others = announced | {2: software(2, package="0.0.1", **claim)}
    [event] = await watch(Directory(others), range(10, 20))
    assert (event["since"], event["network_package"]) == (20, package_version("tplr"))
    with pytest.raises(Outdated, match="from window 20 on"):
        await watch(Directory(others), range(18, 25))


async def test_a_newer_package_is_a_hint() -> None:
    newer: dict[int, Software | Exception] = {0: software(0, package="9.0"), 1: software(1, package="10.0.1")}
    [event] = await watch(Directory(newer), range(30))
    assert event["network_package"] == "9.0"  # the newest version that more than half of the stake have, or newer
    assert await watch(Directory({0: software(0, package="0.0.9"), 1: software(1)}), range(30)) == []


async def test_whatever_a_validator_publishes_the_node_goes_on() -> None:
    hostile: dict[int, Software | Exception] = {
        0: PayloadError("not JSON"),
        1: StoreUnavailable("down"),
        2: software(0, spec=99),  # of another uid
    }
    assert await watch(Directory(hostile), range(30)) == []


@pytest.mark.parametrize(
    ("version", "published"),
    [
        ("1.0rc1", "1.0rc1"),
        ("1.0.dev3", "1.0.dev3"),
        ("1.0b2.dev20261130", "1.0b2.dev20261130"),
        ("1.0+cpu", "1.0"),
        ("1.0.post1.dev2", "1.0"),
    ],
)
def test_a_version_is_published_without_local_and_post_release(
    monkeypatch: pytest.MonkeyPatch, version: str, published: str
) -> None:
    monkeypatch.setattr("tplr.node.software.package_version", lambda _: version)
    assert own_software(9, OLD).package == published


async def test_a_release_is_newer_than_its_pre_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(own: str, other: str) -> bool:
        monkeypatch.setattr("tplr.node.software.package_version", lambda _: own)
        documents: dict[int, Software | Exception] = {uid: software(uid, package=other) for uid in STAKES}
        return bool(await watch(Directory(documents), range(2)))

    ascending = ["0.9.9", "1.0.dev3", "1.0a1.dev2", "1.0a1", "1.0a10", "1.0b1", "1.0rc1", "1.0", "1.0.1rc1", "1.0.1"]
    for place, own in enumerate(ascending):
        assert [await told(own, other) for other in ascending] == [place < at for at in range(len(ascending))]
    assert not await told("1.0", "1.0.0")
