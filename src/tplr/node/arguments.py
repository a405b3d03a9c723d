"""The command-line arguments that all nodes share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tplr.home_paths import home_path
from tplr.number_arguments import port, positive_count, positive_number

if TYPE_CHECKING:
    from tplr.training.device import DeviceSettings


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The parsed command line of a node; ``add_arguments`` documents each field."""

    role: str
    netuid: int
    wallet_name: str
    wallet_hotkey: str
    wallet_path: Path
    network: str
    archive: tuple[str, ...]
    device: str
    rank_timeout: float
    compile: bool | None
    checkpointing: str | None
    loss_rows: int | None
    fused_adamw: bool | None
    copy_ahead: bool | None
    gather_bfloat16: bool | None
    offload_weights: bool | None
    offload_error_feedback: bool | None
    profile: Path | None
    hparams: Path
    state: Path
    events: Path | None
    events_max_mb: float
    log_format: Literal["text", "json"]
    metrics_port: int | None
    metrics_address: str
    wandb_project: str | None
    test: bool
    check: bool
    debug: bool
    trace: bool

    @property
    def state_folder(self) -> Path:
        """The folder of this neuron's state, unique for each role and hotkey."""
        return self.state / f"{self.netuid}-{self.wallet_name}-{self.wallet_hotkey}-{self.role}"

    @property
    def device_settings(self) -> DeviceSettings:
        """The given settings, with the device's defaults for the others. Imports torch."""
        from tplr.training.device import DeviceSettings

        given = {field.name: getattr(self, field.name) for field in fields(DeviceSettings)}
        if self.role != "miner":
            given["gather_bfloat16"] = False  # a trial step changes norms by less than the resolution of bfloat16
        return DeviceSettings.of(self.device, **given)


NEWEST_LOCALNET = Path("runs/latest")


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the arguments that all nodes share."""
    add = parser.add_argument
    add("--netuid", type=int, default=3, help="subnet (default: %(default)s)")
    add("--wallet.name", dest="wallet_name", default="default", help="coldkey's name (default: %(default)s)")
    add("--wallet.hotkey", dest="wallet_hotkey", default="default", help="hotkey's name (default: %(default)s)")
    add("--wallet.path", dest="wallet_path", type=home_path, default="~/.bittensor/wallets", help="wallets' folder")
    add("--subtensor.network", dest="network", default="finney", help="name, endpoint, or local:FILE of a localnet")
    add(
        "--subtensor.archive",
        dest="archive",
        type=_comma_separated,
        default=(),
        metavar="URL[,URL]",
        help="archive nodes, for a node that was offline for long (default: the network's own)",
    )
    add("--device", default="cuda", help="torch device: cuda, cuda:1, cpu (default: %(default)s)")
    _add_device_arguments(parser)
    add(
        "--rank-timeout",
        type=positive_number,
        default=120.0,
        metavar="SECONDS",
        help="under torchrun, restart all ranks if one does not answer within this time (default: %(default)s)",
    )
    add(
        "--hparams",
        type=Path,
        default=Path("hparams.json"),
        help="file with the run's constants (default: %(default)s)",
    )
    add(
        "--local",
        nargs="?",
        type=Path,
        const=NEWEST_LOCALNET,
        metavar="RUN",
        help=f"use hparams and chain of the localnet in this folder (default: {NEWEST_LOCALNET}); commands that read "
        "a network also start its storage",
    )
    add("--state", type=home_path, default="~/.cache/tplr/state", help="folder of saved state (default: %(default)s)")
    add("--events", type=Path, default=None, help="append events as JSON lines to this file; watch: show them")
    add(
        "--events-max-mb",
        type=positive_number,
        default=100.0,
        metavar="MB",
        help="size at which the file is renamed to FILE.1, replacing an older FILE.1 (default: %(default)s)",
    )
    add("--log-format", choices=("text", "json"), default="text", help="format of the log (default: %(default)s)")
    add("--metrics-port", type=port, metavar="PORT", help="serve metrics for Prometheus (needs the extra 'metrics')")
    add(
        "--metrics-address",
        default="127.0.0.1",
        help="address of the metrics server; 0.0.0.0: all interfaces (default: %(default)s)",
    )
    add("--wandb.project", dest="wandb_project", help="chart events in this W&B project (needs the extra 'wandb')")
    add(
        "--test",
        action="store_true",
        help="gather from every bucket on chain instead of from the peer list; all nodes of a network must agree on it",
    )
    add("--check", action="store_true", help="run the start-up checks and exit")
    add("--debug", action="store_true", help="log at level DEBUG")
    add("--trace", action="store_true", help="log at level TRACE")


def _add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the settings of the device (defaults: ``docs/engine.md``); nodes need not agree on them."""
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--compile", action=switch, help="compile the decoder layer, and a miner's loss")
    add("--checkpointing", choices=("none", "selective", "full"), help="activations to recompute in the backward pass")
    add("--loss-rows", type=positive_count, metavar="N", help="predictions whose logits are in memory at a time")
    add("--fused-adamw", action=switch, help="miner: fused AdamW kernel")
    add("--copy-ahead", action=switch, help="miner: copy the next batch to the GPU during computation")
    add("--gather-bfloat16", action=switch, help="miner under torchrun: gather layers' weights in bfloat16")
    add("--offload-weights", action=switch, help="miner: keep the weights from before the inner steps in host memory")
    add("--offload-error-feedback", action=switch, help="miner: keep error feedback in host memory during training")
    add(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="miner: write a profiler trace of the second window to this folder",
    )


def node_arguments(args: argparse.Namespace) -> Arguments:
    """Convert a parsed command line to the arguments of ``add_arguments``; ``args.command`` is the role."""
    given = {field.name: getattr(args, field.name) for field in fields(Arguments) if field.name != "role"}
    if args.local:
        given |= {"hparams": args.local / "hparams.json", "network": f"local:{args.local / 'chain.sqlite'}"}
    return Arguments(role=args.command, **given)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
