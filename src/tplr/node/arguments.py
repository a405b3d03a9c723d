"""The command-line arguments of a neuron."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Parsed arguments; ``parse_arguments`` describes each."""

    role: str
    netuid: int
    wallet_name: str
    wallet_hotkey: str
    wallet_path: Path
    network: str
    archive: tuple[str, ...]
    device: str
    hparams: Path
    state: Path
    events: Path | None
    wandb_project: str | None
    test: bool
    check: bool
    debug: bool
    trace: bool

    @property
    def state_folder(self) -> Path:
        """Folder of this neuron's state, unique for each role and hotkey."""
        return self.state.expanduser() / f"{self.netuid}-{self.wallet_name}-{self.wallet_hotkey}-{self.role}"


NEWEST_LOCALNET = Path("runs/latest")


def parse_arguments(role: str, argv: Sequence[str] | None = None) -> Arguments:
    """Parse ``argv`` (default: ``sys.argv``). Exits with status 2 and a usage line if it is invalid."""
    parser = argparse.ArgumentParser(prog=role, description=f"Run a templar {role}.")
    add = parser.add_argument
    add("--netuid", type=int, default=3, help="subnet (default: %(default)s)")
    add("--wallet.name", dest="wallet_name", default="default", help="coldkey's name (default: %(default)s)")
    add("--wallet.hotkey", dest="wallet_hotkey", default="default", help="hotkey's name (default: %(default)s)")
    add("--wallet.path", dest="wallet_path", type=Path, default=Path("~/.bittensor/wallets"), help="wallets' folder")
    add("--subtensor.network", dest="network", default="finney", help="name, endpoint, or local:FILE of a localnet")
    add(
        "--subtensor.archive",
        dest="archive",
        type=_comma_separated,
        default=(),
        metavar="URL[,URL]",
        help="archive nodes, for a neuron that was away for long (default: the network's own)",
    )
    add("--device", default="cuda", help="torch device: cuda, cuda:1, cpu (default: %(default)s)")
    add(
        "--hparams",
        type=Path,
        default=Path("hparams.json"),
        help="file with the run's constants (default: %(default)s)",
    )
    add("--local", action="store_true", help=f"use hparams and chain of the localnet in {NEWEST_LOCALNET}")
    add("--state", type=Path, default=Path("~/.cache/tplr/state"), help="folder of saved state (default: %(default)s)")
    add("--events", type=Path, default=None, help="append events as JSON lines to this file")
    add("--wandb.project", dest="wandb_project", help="chart events in this W&B project (needs the extra 'wandb')")
    add(
        "--test",
        action="store_true",
        help="gather from every bucket on chain instead of from the peer list; all nodes of a network must agree on it",
    )
    add("--check", action="store_true", help="run the start-up checks and exit")
    add("--debug", action="store_true", help="log at level DEBUG")
    add("--trace", action="store_true", help="log at level TRACE")
    given = vars(parser.parse_args(argv))
    if given.pop("local"):
        given |= {"hparams": NEWEST_LOCALNET / "hparams.json", "network": f"local:{NEWEST_LOCALNET / 'chain.sqlite'}"}
    given["wallet_path"] = given["wallet_path"].expanduser()
    return Arguments(role=role, **given)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
