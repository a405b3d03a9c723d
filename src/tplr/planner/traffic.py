"""Computes bytes and requests of a node's bucket in a window, and their price at Cloudflare R2's list prices.

Source of the prices: developers.cloudflare.com/r2/pricing. Writes and lists are class A, reads and heads class B; the
owner of a bucket pays for both; egress is free. Counts of requests are those of the storage server's log in a localnet
of three miners, rounded up (``docs/plan.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from tplr.exchange.retention import AGGREGATES, EACH_WINDOW, windows_of_checkpoints
from tplr.hparams import HParams
from tplr.planner.memory import Role
from tplr.planner.workload import Workload
from tplr.scoring.selection import FEWEST_ON_PROBATION
from tplr.storage.base import MAX_PUT_BYTES
from tplr.storage.parts import count_parts

DOLLARS_PER_GB_MONTH = 0.015
DOLLARS_PER_CLASS_A = 4.50e-6
DOLLARS_PER_CLASS_B = 0.36e-6
SECONDS_PER_MONTH = 30 * 86400.0

# A miner writes commit, update and report; a leading validator report, seal, scores and, at intervals, a peer list.
WRITES = {"miner": 3, "validator": 4}
# A reader of an update requests the commit once, and the update about every half second until it is available; then it
# fetches the update.
READS_PER_READER = 5
# Requests by a reader of the leading validator's documents: start window, peer lists, reports and decisions.
LISTS_PER_FOLLOWER, READS_PER_FOLLOWER = 1, 4
# Means of one of five answering electors, with 20 peers (``docs/benchmarks/trust.csv``); the reads are the others'.
ELECTION_WRITES, ELECTION_READS = 4, 10
READS_OF_AGGREGATE = 2  # a check whether it exists, and the aggregate itself
ELECTION_SENT, ELECTION_RECEIVED = 38_000, 111_000


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of one node in one window.

    Attributes:
        uploaded, downloaded: bytes.
        class_a, class_b: billable requests on its bucket: its own writes, and those of ``readers`` nodes.
        stored: bytes in its bucket in a steady state.
    """

    uploaded: int
    downloaded: int
    class_a: int
    class_b: int
    stored: int
    readers: int

    def dollars_per_month(self, window_seconds: float) -> dict[str, float]:
        """Return the price by kind. Free allowances are not subtracted."""
        windows = SECONDS_PER_MONTH / window_seconds
        return {
            "storage": self.stored / 1e9 * DOLLARS_PER_GB_MONTH,
            "class A": windows * self.class_a * DOLLARS_PER_CLASS_A,
            "class B": windows * self.class_b * DOLLARS_PER_CLASS_B,
        }


def traffic(load: Workload, role: Role, *, readers: int) -> Traffic:
    """Compute the traffic of a miner whose update ``readers`` nodes gather, or of the leading validator.

    The validator is one of five electors. It also publishes checkpoints, and the aggregate of each window: an upper
    bound, because several validators alternate. Aggregates are kept as long as updates, or until they are older than
    the kept checkpoints.
    """
    hparams, size = load.hparams, load.update_bytes
    miner = role == "miner"
    checkpoint = 0 if miner else load.shared_bytes
    parts = 0.0 if miner else count_parts(checkpoint) / hparams.checkpoint_frequency
    aggregate = size * hparams.max_topk_peers
    sent = size if miner else aggregate
    kept = hparams.gradient_retention_windows if miner else windows_of_checkpoints(hparams)
    # A node lists each kind of its own objects that expires, one after another.
    lists = len(EACH_WINDOW) + (0 if miner else len(AGGREGATES) + readers * LISTS_PER_FOLLOWER)
    reads = READS_PER_READER if miner else READS_PER_FOLLOWER
    return Traffic(
        uploaded=sent + checkpoint // hparams.checkpoint_frequency + (0 if miner else ELECTION_SENT),
        downloaded=size * updates_fetched(hparams, role) + (0 if miner else ELECTION_RECEIVED),
        class_a=WRITES[role] + lists + round(parts) + (0 if miner else ELECTION_WRITES + put_requests(aggregate)),
        class_b=readers * reads + (0 if miner else ELECTION_READS),
        stored=sent * kept + checkpoint * hparams.checkpoints_kept,
        readers=readers,
    )


def aggregator_traffic(load: Workload, *, readers: int) -> Traffic:
    """Compute the traffic of an aggregator from whose bucket ``readers`` nodes request each window's aggregate.

    It fetches the updates of the peer list and its reserve, before the included set is decided.
    """
    hparams, aggregate = load.hparams, load.update_bytes * load.hparams.max_topk_peers
    return Traffic(
        uploaded=aggregate,
        downloaded=aggregate + load.update_bytes * hparams.reserve_peers + ELECTION_RECEIVED,
        class_a=len(AGGREGATES) + put_requests(aggregate),
        class_b=readers * READS_OF_AGGREGATE,
        stored=aggregate * windows_of_checkpoints(hparams),
        readers=readers,
    )


def updates_fetched(hparams: HParams, role: Role, *, probation: int | None = None) -> int:
    """Return the number of updates that a node fetches in a window.

    Every node asks the peer list and its reserve at once. A validator votes on these updates; it fetches the decided
    ones again to apply them, and the reserve and those on probation to measure them.

    Args:
        probation: number of miners on probation in addition to the reserve; default: as many as a list can name.
    """
    named = hparams.max_topk_peers + hparams.reserve_peers
    if role == "miner":
        return named
    if hparams.profile == "documented":
        return named + hparams.max_topk_peers + hparams.uids_per_window  # it measures those that it has sampled
    if probation is None:
        probation = max(hparams.max_topk_peers, FEWEST_ON_PROBATION) if hparams.probation_windows else 0
    return 2 * named + probation


def put_requests(size: int) -> int:
    """Return the number of requests that store an aggregate: one, or for a large one its parts, and begin and end."""
    return 1 if size <= MAX_PUT_BYTES else count_parts(size) + 2
