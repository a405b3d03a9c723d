"""``tplr generate``: continue a prompt with an exported model, or with the model of a run."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.cli.network import add_network_arguments, device_name, run_on_network, window_or
from tplr.cli.reported import run_reported

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader
    from tplr.run.folder import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tplr generate [-h] [options] MODEL PROMPT\n       tplr generate [-h] [options] PROMPT [--local RUN]"
    add = parser.add_argument
    add(
        "words",
        nargs="+",
        metavar="[MODEL] PROMPT",
        help="folder of tplr export, and the text to continue; without a folder, the model of a run",
    )
    add("--tokens", type=int, default=100, metavar="N", help="maximum number (default: %(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the most probable token (default: %(default)s)")
    add("--top-p", type=float, default=0.95, metavar="P", help="sample among the most probable (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    add(
        "--window",
        default="checkpoint",
        type=window_or("latest", "checkpoint"),
        metavar="W|latest|checkpoint",
        help="of a run's model: the last window that it has applied (default: that of the newest checkpoint)",
    )
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if len(args.words) > 2:
        args.parser.error(f"expected a model's folder and a prompt, got {len(args.words)} words: quote the prompt")
    if not (args.temperature >= 0 and 0 < args.top_p <= 1 and args.tokens > 0):
        args.parser.error("expected --tokens above 0, --temperature of at least 0, and --top-p above 0 and up to 1")
    *folder, prompt = args.words

    def write(loaded: "LoadedModel") -> int:
        from tplr.run.generate import Sampling, generate

        generate(loaded, prompt, Sampling(args.tokens, args.temperature, args.top_p, args.seed), _write)
        _write("\n")
        return 0

    async def of_run(network: "NetworkReader", device: str) -> int:
        from tplr.run.window_model import loaded_model

        return write(await loaded_model(network, args.window, device))

    def of_folder() -> int:
        from tplr.run.folder import load_model

        return write(load_model(Path(folder[0]), device_name(args.device)))

    if folder and args.local:
        args.parser.error("give a model's folder or --local, not both; --local takes the next word as its folder")
    return run_reported(of_folder, debug=args.debug) if folder else run_on_network(args, of_run)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
