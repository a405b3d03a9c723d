"""A node's start-up checks as findings of ``tplr doctor``: reports all problems at once, before the node is started."""

import time
from contextlib import AsyncExitStack

from tplr.chain.connect import LOCAL_PREFIX
from tplr.chain.manager import FINAL_AFTER_BLOCKS
from tplr.config import Environment
from tplr.doctor import Report
from tplr.errors import ConfigError
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks
from tplr.node.start_checks import MAX_SKEW_SECONDS
from tplr.node.startup import prepare
from tplr.storage.probe import Finding, ProbeResult


async def examine_node(args: Arguments, environment: Environment) -> Report:
    """Check wallet, registration, permit, chain, dataset, tokenizer, device, memory and disk of the node of ``args``.

    Builds the model as at a start, and leaves nothing running.
    """
    checks = Checks()
    endpoints = await examine_endpoints(args)  # before the model is built, which blocks
    async with AsyncExitStack() as stack:
        await prepare(args, environment, stack, checks)
    findings = _neuron_finding(checks, args)
    findings += [Finding(one.check, ProbeResult.PROBLEM, one.text, outside=one.outside) for one in checks.problems]
    findings += endpoints
    for name, like in environment.unknown_names().items():
        remedy = f"did you mean {like}?" if like else "remove it"
        findings.append(Finding("environment", ProbeResult.WARNING, f"unknown variable {name}", remedy))
    return Report(f"start-up checks of the {args.role} {args.wallet_name}/{args.wallet_hotkey}", findings)


def _neuron_finding(checks: Checks, args: Arguments) -> list[Finding]:
    """Return what the chain reports about this neuron, independently of other problems."""
    if checks.neuron is None:
        return []
    neuron, verdict, remedy = checks.neuron, ProbeResult.OK, ""
    found = f"uid {neuron.uid} on subnet {args.netuid}, stake {neuron.stake:g}"
    if not checks.problems:
        found = f"all passed; {found}"
    if args.role == "validator" and not neuron.permit:
        verdict, found = ProbeResult.WARNING, f"{found}, without a validator permit"
        remedy = "its weights are refused until it has a permit: more stake"
    return [Finding("start-up", verdict, found, remedy)]


async def examine_endpoints(args: Arguments) -> list[Finding]:
    """Check each chain endpoint in ``args``: it must answer, follow the chain, and agree with this machine's clock.

    If another endpoint answers, a failed one is only a warning. One that serves another chain than the first that
    answers is a problem: a first start while the first is down would take the other chain for the node's.
    """
    if args.network.startswith(LOCAL_PREFIX):
        return []
    from tplr.chain.subtensor import EndpointHead, probe_endpoints  # bittensor takes seconds to import

    try:
        found = await probe_endpoints(args.network, args.archive)
    except ConfigError:  # the start-up checks report it
        return []
    heads = [(name, head) for name, head in found if isinstance(head, EndpointHead)]
    bad = ProbeResult.WARNING if heads else ProbeResult.PROBLEM
    first, genesis = next(((name, head.genesis) for name, head in heads), ("", ""))
    newest = max((head.number for _, head in heads if head.genesis == genesis), default=0)
    findings = []
    for name, head in found:
        if not isinstance(head, EndpointHead):
            remedy = "check the network, or remove it from the list"
            findings.append(Finding("chain endpoint", bad, f"{name}: {head}", remedy, outside=True))
            continue
        if head.genesis != genesis:
            said = f"{name}: genesis {head.genesis}, another chain than {first} with {genesis}"
            findings.append(Finding("chain endpoint", ProbeResult.PROBLEM, said, "remove the one that is wrong"))
            continue
        age, behind = time.time() - head.time, newest - head.number
        said = f"{name}: block {head.number}, {age:.0f} s old"
        if behind > FINAL_AFTER_BLOCKS:
            remedy = "it does not follow the chain: remove it from the list"
            findings.append(Finding("chain endpoint", ProbeResult.WARNING, f"{said}, {behind} behind", remedy))
        elif abs(age) > MAX_SKEW_SECONDS:
            remedy = "set this machine's clock (ntp); if that is right, the chain has stalled"
            findings.append(Finding("chain endpoint", ProbeResult.WARNING, said, remedy))
        else:
            findings.append(Finding("chain endpoint", ProbeResult.OK, said))
    return findings
