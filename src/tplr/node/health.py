"""A node's start-up checks as findings of ``tplr doctor``: all problems at once, before anything is started."""

from contextlib import AsyncExitStack

from tplr.config import Environment
from tplr.doctor import Report
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks
from tplr.node.startup import Node, prepare
from tplr.storage.probe import Finding, ProbeResult


async def examine_node(args: Arguments, environment: Environment) -> Report:
    """Wallet, registration, chain, clock, dataset, tokenizer, device, memory and disk of the node of ``args``.

    The model is built, as at a start, and nothing is left running.
    """
    checks = Checks()
    async with AsyncExitStack() as stack:
        node = await prepare(args, environment, stack, checks)
        findings = [_standing(node, args)] if node else []
    findings += [Finding(one.check, ProbeResult.PROBLEM, one.text, outside=one.outside) for one in checks.problems]
    for name, like in environment.unknown_names().items():
        remedy = f"did you mean {like}?" if like else "remove it"
        findings.append(Finding("environment", ProbeResult.WARNING, f"nothing reads {name}", remedy))
    return Report(f"start-up checks of the {args.role} {args.wallet_name}/{args.wallet_hotkey}", findings)


def _standing(node: Node, args: Arguments) -> Finding:
    """What the chain says of this neuron, all checks having passed."""
    comms = node.context.comms
    neuron = comms.metagraph.neurons[[one.uid for one in comms.metagraph.neurons].index(comms.uid)]
    found = f"all passed; uid {comms.uid} on subnet {args.netuid}, stake {neuron.stake:g}"
    if args.role == "validator" and not neuron.permit:
        remedy = "its weights are refused until it has a permit: more stake"
        return Finding("start-up", ProbeResult.WARNING, f"{found}, without a validator permit", remedy)
    return Finding("start-up", ProbeResult.OK, found)
