"""``tplr doctor`` reports on a chain's nodes and on this neuron, each independently of other problems."""

import time
from typing import Any

import pytest

pytest.importorskip("bittensor")

from tplr.chain import subtensor
from tplr.chain.base import Neuron
from tplr.chain.subtensor import EndpointHead
from tplr.node.checks import Checks, Problem
from tplr.node.health import _neuron_finding, examine_endpoints
from tplr.storage.probe import ProbeResult

OK, WARNING, PROBLEM = ProbeResult.OK, ProbeResult.WARNING, ProbeResult.PROBLEM


async def findings(monkeypatch: pytest.MonkeyPatch, *found: EndpointHead | str) -> list[tuple[ProbeResult, str]]:
    async def probe(*_: object) -> list[tuple[str, EndpointHead | str]]:
        return [(f"ws://{number}", one) for number, one in enumerate(found)]

    monkeypatch.setattr(subtensor, "probe_endpoints", probe)
    args: Any = type("Arguments", (), {"network": "ws://0", "archive": ()})
    return [(one.verdict, f"{one.found}: {one.remedy}") for one in await examine_endpoints(args)]


async def test_each_node_of_the_chain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    good, late, slow = (EndpointHead(*one, "0xa") for one in ((500, now - 6), (480, now - 246), (500, now - 900)))
    said = await findings(monkeypatch, good, "refused", late, slow, EndpointHead(9000, now, "0xb"))
    assert [verdict for verdict, _ in said] == [OK, WARNING, WARNING, WARNING, PROBLEM]
    assert "ws://0: block 500, 6 s old" in said[0][1]
    assert "ws://1: refused: check the network, or remove it from the list" in said[1][1]
    assert "20 behind: it does not follow the chain" in said[2][1]
    assert "900 s old: set this machine's clock (ntp)" in said[3][1]
    assert "ws://4: genesis 0xb, another chain than ws://0 with 0xa: remove the one that is wrong" in said[4][1]
    assert [verdict for verdict, _ in await findings(monkeypatch, "refused", "mute")] == [PROBLEM, PROBLEM]


async def test_a_chain_file_has_no_nodes_and_an_unknown_network_is_said_elsewhere() -> None:
    for network in ("local:chain.sqlite", "atlantis"):
        args: Any = type("Arguments", (), {"network": network, "archive": ()})
        assert await examine_endpoints(args) == []


def test_a_missing_permit_is_said_also_when_something_else_is_wrong() -> None:
    checks, args = Checks(), type("Arguments", (), {"role": "validator", "netuid": 3})
    assert _neuron_finding(checks, args) == []  # type: ignore[arg-type]
    checks.neuron = Neuron(uid=5, hotkey="h", coldkey="c", stake=7.0, permit=False, last_update=0)
    checks.problems.append(Problem("dataset", "not there", outside=False))
    [finding] = _neuron_finding(checks, args)  # type: ignore[arg-type]
    assert finding.verdict is WARNING
    assert finding.found == "uid 5 on subnet 3, stake 7, without a validator permit"
    checks.neuron = Neuron(uid=5, hotkey="h", coldkey="c", stake=7.0, permit=True, last_update=0)
    checks.problems.clear()
    [finding] = _neuron_finding(checks, args)  # type: ignore[arg-type]
    assert (finding.verdict, finding.found) == (OK, "all passed; uid 5 on subnet 3, stake 7")
