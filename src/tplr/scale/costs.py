"""Computes each participant's cost per window by network size: requests and their price, bytes, CPU time, memory.

Request counts follow the code. The counts of repeated reads (peer lists, reports) come from the storage server's log
in a localnet of eight miners and three validators (``docs/scale.md``). All other figures are arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tplr.exchange.gather import POLL_SECONDS
from tplr.exchange.retention import AGGREGATES, EACH_WINDOW
from tplr.hparams import HParams
from tplr.node import windows as node_windows
from tplr.node.replica import PREFETCH_WINDOWS
from tplr.planner.host import ACCELERATORS
from tplr.planner.traffic import DOLLARS_PER_CLASS_A, DOLLARS_PER_CLASS_B, put_requests, updates_fetched
from tplr.planner.workload import Workload
from tplr.scale.polls import count_polls
from tplr.scoring.selection import UIDS_PER_LOSS_EVALUATION
from tplr.training.evaluation import CALIBRATION_PART

Participant = Literal["miner", "validator", "leader", "aggregator", "newcomer"]
PARTICIPANTS: tuple[Participant, ...] = get_args(Participant)

DAY = 86_400.0
REQUEST = 0.11  # seconds, as the simulation assumes
HASH_RATE = 1.5e9  # bytes per second of SHA-256 on one core with its instructions
# Measured in a localnet: a node's reads of the peer list, and of electors' reports (found or not), per window.
LIST_READS, REPORT_READS = 2.5, 3.0
# Votes, echoes, statuses and decisions that an elector reads (benchmarks/trust.md, 5 and 20 electors); it writes four.
BALLOT_READS, BALLOT_WRITES = 2.3, 4


@dataclass(frozen=True, kw_only=True)
class Network:
    """The size of a network.

    Attributes:
        uids: number of all uids. The ``validators`` are among the uids, the ``electors`` among the validators.
        probation: number of uids that validators measure in addition to the peer list and its reserve.
    """

    uids: int
    validators: int
    electors: int
    probation: int

    @classmethod
    def of(cls, uids: int, hparams: HParams, *, probation: int | None = None) -> Network:
        """Return a network of ``uids`` uids; with ``probation`` None all other miners are on probation."""
        validators = {20: 3, 256: 20}.get(uids, 64)
        electors = min(validators, 20)
        rest = max(0, uids - validators - hparams.max_topk_peers - hparams.reserve_peers)
        return cls(
            uids=uids,
            validators=validators,
            electors=electors,
            probation=rest if probation is None else min(probation, rest),
        )

    @property
    def majority(self) -> int:
        """Number of electors that a node asks first."""
        return self.electors // 2 + 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one participant in one window.

    Attributes:
        reads, lists: GETs and HEADs (``reads``) and LISTs that it sends to others' buckets; their owners pay.
        writes: requests to its own bucket, including LISTs of its own old objects.
        served_reads, served_lists: the same requests that others send to its bucket.
        down, up: bytes received and sent.
        cpu: seconds of one core for hashing.
        memory: bytes of updates that it holds at once.
    """

    reads: float
    lists: float
    writes: float
    served_reads: float
    served_lists: float
    down: float
    up: float
    cpu: float
    memory: float

    def dollars_a_day(self, window_seconds: float) -> float:
        """Return the price of requests per day that the owner of its bucket pays."""
        each = (self.writes + self.served_lists) * DOLLARS_PER_CLASS_A + self.served_reads * DOLLARS_PER_CLASS_B
        return each * DAY / window_seconds


def cost(load: Workload, who: Participant, network: Network, *, wait: float, until_decided: float) -> Cost:
    """Return a participant's cost in a window; a ``miner`` is one on the peer list.

    Args:
        wait: seconds that a reader polls for an update until it is available.
        until_decided: seconds that a node polls for the decision.
    """
    hparams, update = load.hparams, load.update_bytes
    listed, named = hparams.max_topk_peers, hparams.max_topk_peers + hparams.reserve_peers
    of_update = float(count_polls(wait, shortest=POLL_SECONDS, request=REQUEST)) + 2  # commit and body
    decision = network.majority * float(count_polls(until_decided, shortest=node_windows.POLL_SECONDS, request=REQUEST))
    follows = decision + network.majority * (LIST_READS + REPORT_READS)
    lists = network.majority * LIST_READS
    cleanup, nodes = len(EACH_WINDOW), network.uids
    checkpoint = load.shared_bytes / hparams.checkpoint_frequency
    measured = named + network.probation
    aggregate = put_requests(listed * update)
    if who == "miner":
        return Cost(
            reads=named * of_update + follows,
            lists=lists,
            writes=3 + cleanup,
            served_reads=nodes * of_update,
            served_lists=0,
            down=named * update,
            up=update,
            cpu=(named + 1) * update / HASH_RATE,
            memory=named * update,
        )
    if who in ("validator", "leader"):
        # Every node asks the first electors in rank order; the leader is always among them.
        share = 1.0 if who == "leader" else network.majority / network.electors
        fetched = updates_fetched(hparams, "validator", probation=network.probation)
        activity = nodes - network.validators
        ballots = BALLOT_READS * network.electors
        return Cost(
            reads=named * of_update + 2 + (measured - listed) * 3 + measured + activity + ballots + follows,
            lists=lists,
            # Lists of old objects; report, seal and scores; ballots; the aggregate.
            writes=cleanup + len(AGGREGATES) + 3 + BALLOT_WRITES + aggregate * network.majority / network.electors,
            served_reads=share * nodes * (decision + network.majority * (LIST_READS + REPORT_READS)) / network.majority
            + ballots,
            served_lists=share * nodes * LIST_READS,
            down=fetched * update,
            # The first electors in a window's order with more than half of the stake publish an aggregate each.
            up=network.majority / network.electors * listed * update + checkpoint,
            cpu=fetched * update / HASH_RATE,
            memory=(named + measured) * update,
        )
    if who == "aggregator":
        return Cost(
            reads=named * of_update + decision,
            lists=lists,
            writes=len(AGGREGATES) + aggregate,
            served_reads=2 * network.validators,
            served_lists=0,
            down=named * update,
            up=listed * update,
            cpu=named * update / HASH_RATE,
            memory=(named + listed) * update,
        )
    return Cost(  # a newcomer, for each window that it applies
        reads=2 + follows,
        lists=lists,
        writes=0,
        served_reads=0,
        served_lists=0,
        down=listed * update,
        up=0,
        cpu=listed * update / HASH_RATE,
        memory=(1 + PREFETCH_WINDOWS) * listed * update,
    )


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Seconds of device time that a validator's measurements take in a window.

    Attributes:
        gradient: one gradient on held-out pages, for all updates at once.
        own_pages: the gradients on the tested uids' own pages.
        losses: forward passes on held-out pages: one for the model, and one on a part (``CALIBRATION_PART``) of them
            for one in ``UIDS_PER_LOSS_EVALUATION`` tested uids.
    """

    gradient: float
    own_pages: float
    losses: float

    @property
    def seconds(self) -> float:
        return self.gradient + self.own_pages + self.losses


def measures(load: Workload, *, tested: int, sequences: int, gpu: str, gpus: int, mfu: float) -> Measures:
    """Return the device time for testing ``tested`` uids per window with ``sequences`` sequences per gradient."""
    rate = gpus * mfu * ACCELERATORS[gpu].peak
    gradient = sequences * load.hparams.sequence_length * load.flops_per_token / rate
    by_loss = -(-tested // UIDS_PER_LOSS_EVALUATION)
    losses = (1 + by_loss / CALIBRATION_PART) * gradient / 3
    return Measures(gradient=gradient, own_pages=tested * gradient, losses=losses)


def sequences_read(load: Workload) -> int:
    """Return the number of sequences that a validator reads for one gradient (``Observer``).

    It is ``validator_sample_rate`` of a page list's batches, but at least ``evaluation_sequences``, in whole batches.
    """
    hparams = load.hparams
    batches = max(
        -(-load.tokens // (hparams.batch_size * hparams.sequence_length)) * hparams.validator_sample_rate,
        hparams.evaluation_sequences / hparams.batch_size,
    )
    return int(-(-batches // 1)) * hparams.batch_size
