"""``tplr join``: take part in a run with a given description."""

import argparse
import shlex
import sys
from pathlib import Path

from tplr.number_arguments import number_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("description", type=Path, metavar="run.toml", help="of the run, from its owner; hparams are beside it")
    add("--role", choices=("miner", "validator", "aggregator"), default="miner", help="default: %(default)s")
    add("--wallet.name", dest="wallet_name", help="coldkey's name (asked for if missing)")
    add("--wallet.hotkey", dest="wallet_hotkey", help="hotkey's name (asked for if missing)")
    add("--wallet.path", dest="wallet_path", type=Path, default=Path("~/.bittensor/wallets"), help="wallets' folder")
    add("--device", default="cuda", help="torch device (default: %(default)s)")
    add("--ranks", type=int, default=1, metavar="N", help="processes, one for each GPU (default: %(default)s)")
    add("--folder", type=Path, help="of .env, state and events (default: that of run.toml)")
    add("--down", type=float, default=500.0, metavar="MBIT/S", help="of the link (default: %(default)s)")
    add("--up", type=float, default=110.0, metavar="MBIT/S", help="of the link (default: %(default)s)")
    add("--no-input", action="store_true", help="ask no questions: a missing value is an error that names what to set")
    add("--replace-env", action="store_true", help="replace a .env with other content without asking")
    add("--dry-run", action="store_true", help="show the run's requirements and costs on this machine, and exit")
    add("--install", action="store_true", help="install and start the systemd unit instead of printing it")
    add("--unit-folder", type=Path, help="where --install writes it; it is then not started")
    add("--node-options", type=shlex.split, default=[], metavar="='...'", help="more options of the node, in quotes")


def run(args: argparse.Namespace) -> int:
    from tplr.config import process_variables
    from tplr.errors import ConfigError, TplrError
    from tplr.join.account import acting_as, service_account
    from tplr.join.description import load_description
    from tplr.logging import setup_logging

    setup_logging()
    problems = number_problems(args, ("ranks", "down", "up"))
    folder = args.folder or args.description.parent
    try:
        with acting_as(service_account(folder.absolute())):
            load_description(args.description)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    try:
        if problems:
            raise ConfigError(problems)
        from tplr.join.steps import Answers, Questions, join  # imports PyTorch, which takes seconds

        given = {name: getattr(args, name) for name in Answers.__dataclass_fields__}
        asked = Questions(silent=args.no_input or not sys.stdin.isatty())
        return join(args.description, Answers(**given), asked, process_variables())
    except TplrError as error:
        sys.stderr.write(f"tplr join: {error}\n")
        return 2
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("\ntplr join: stopped; nothing is installed\n")
        return 2
