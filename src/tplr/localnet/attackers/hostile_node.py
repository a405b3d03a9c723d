"""A hostile node: a real node with forged writes. Runs as a process.

    python -m tplr.localnet.attackers.hostile_node SEED FAULTS validator|aggregator ARGUMENT...

Its bucket, wallet and stake are real, and it follows the run like every node, so that its forgeries are timely.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from tplr.chain.connect import LOCAL_PREFIX
from tplr.chain.hotkeys import load_hotkey, sign
from tplr.chain.ledger import Ledger
from tplr.config import Environment, Kind
from tplr.exchange.envelope import Run
from tplr.hparams import load_hparams
from tplr.localnet.attackers.hostile_store import HostileStore, Plot
from tplr.localnet.attackers.sealing import Sealer
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node import startup
from tplr.node.arguments import add_arguments, node_arguments
from tplr.node.main import main as run
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.storage.s3_store import S3Store
from tplr.telemetry import JsonlListener


class HostileConnections(S3Connections):
    """Connections whose stores forge this node's writes into its own bucket, which is of this ``kind``."""

    plot: Plot
    sealer: Sealer
    kind: Kind
    own: str

    @classmethod
    def of(cls, environment: Environment, *, region: str | None = None) -> Self:
        """Create them as for an honest node, and remember the write key of its own bucket. Raises ConfigError."""
        cls.own = environment.bucket(cls.kind, "write").access_key_id
        return super().of(environment, region=region)

    def store(self, bucket: Bucket, renew: Callable[[], Bucket] | None = None) -> S3Store:
        """Return the bucket's store; it is hostile if this node may write to the bucket."""
        honest = super().store(bucket, renew)
        return HostileStore(honest.client, self.plot, self.sealer) if bucket.access_key_id == self.own else honest


def main(argv: Sequence[str]) -> int:
    """Run the node; returns its exit status."""
    seed, faults, role, *rest = argv
    parser = argparse.ArgumentParser()
    parser.set_defaults(command=role)
    add_arguments(parser)
    args = node_arguments(parser.parse_args(rest))
    hparams = load_hparams(args.hparams)
    assert args.events is not None
    tell = JsonlListener(args.events)
    HostileConnections.plot = Plot(
        int(seed),
        Path(faults),
        hang_seconds=hparams.blocks_per_window * BLOCK_SECONDS,
        on_attack=lambda window, behaviour, key: tell(
            {"event": "attacked", "time": time.time(), "window": window, "behaviour": behaviour, "key": key}
        ),
    )
    hotkey = load_hotkey(args.wallet_path, args.wallet_name, args.wallet_hotkey)
    # An aggregator does not sign: it has another node's hotkey, and only reads with it.
    signs = partial(sign, hotkey) if role == "validator" else None
    with contextlib.closing(Ledger(args.network.removeprefix(LOCAL_PREFIX))) as ledger:
        run_of_chain = Run(args.netuid, hparams.version, ledger.genesis_hash)
    HostileConnections.sealer = Sealer(run_of_chain, hotkey.ss58_address, signs)
    HostileConnections.kind = "aggregator" if role == "aggregator" else "gradients"
    # A node's start has no parameter for the connections, because only this program needs one.
    startup.S3Connections = HostileConnections
    return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
