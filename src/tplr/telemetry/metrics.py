"""Table from events to metrics, independent of any monitoring system.

Names follow Prometheus's rules (https://prometheus.io/docs/practices/naming/): base units, counters end in ``_total``.
No label has a window, a hash or a text, so the number of series is bounded by phases, reasons, 256 uids, and the tasks
that the operator names.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tplr.errors import (
    AccessDenied,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreError,
    StoreUnavailable,
    UploadDamaged,
)
from tplr.schemas import Reason
from tplr.scoring.penalties import RULES
from tplr.telemetry.events import HEADER, Cause, Event

# One number, or one for each value of the metric's label; None: the event does not contain it.
Reading = float | Mapping[str, float] | None
NO_LABEL = ""
# Possible results of a request to a bucket.
STORE_ERRORS = (
    StoreError,
    AccessDenied,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreUnavailable,
    UploadDamaged,
)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: a counter's ends in ``_total``.
        event: kind of the event with its value.
        read: returns the value that an event adds to a counter, or sets a gauge to.
        label: name of the label; "" if there is one series.
        replaces: each event has all values of the label, so series of other values end.
        known: values of the label that are known in advance.
    """

    name: str
    help: str
    event: str
    read: Callable[[Event], Reading]
    label: str = ""
    replaces: bool = False
    known: tuple[str, ...] = ()

    @property
    def from_start(self) -> tuple[str, ...]:
        """Values of the label whose series start at 0 before the first event (Prometheus: avoid missing metrics).

        A counter that appears with its first event shows no increase, so ``rate`` and alerts miss that event.
        """
        return self.known or ((NO_LABEL,) if self.kind == "counter" and not self.label else ())

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """A counter only grows; a gauge is the newest value."""
        return "counter" if self.name.endswith("_total") else "gauge"


def _field(name: str) -> Callable[[Event], Reading]:
    return lambda event: event.get(name)


def _one(_: Event) -> float:
    return 1.0


def _phases(event: Event) -> Reading:
    return {name: value for name, value in event.items() if name not in HEADER | NO_PHASES and isinstance(value, float)}


def _gather_results(event: Event) -> Reading:
    return Counter(event["skipped"].values()) + Counter({"included": len(event["included"])})


def _of_gpus(field: str) -> Callable[[Event], Reading]:
    return lambda event: {gpu: one[field] for gpu, one in event["gpus"].items() if field in one}


def _task_results(event: Event) -> Reading:
    return {f"{task} {name}": value for task, found in event["tasks"].items() for name, value in found.items()}


def _share_of_training(event: Event) -> Reading:
    return event["training"] / event["seconds"] if event["role"] == "miner" and event["seconds"] else None


NO_PHASES = frozenset({"seconds", "tokens_per_second", "model_flops_utilisation"})
METRICS: tuple[Metric, ...] = (
    # Windows
    Metric(name="tplr_window", help="Window of the newest block seen.", event="pulse", read=_field("window")),
    Metric(name="tplr_applied_window", help="Newest window applied.", event="applied", read=_field("window")),
    Metric(name="tplr_windows_applied_total", help="Windows applied.", event="applied", read=_one),
    Metric(
        name="tplr_applied_timestamp_seconds",
        help="Unix time at which the newest window was applied.",
        event="applied",
        read=_field("time"),
    ),
    Metric(
        name="tplr_windows_missed_total",
        help="Windows for which this miner has no update that counts.",
        event="missed",
        read=lambda event: {event["cause"]: 1.0},
        label="cause",
        known=get_args(Cause),
    ),
    Metric(
        name="tplr_outdated",
        help="1: most validators run something newer.",
        event="outdated",
        read=lambda event: float(event["text"] != ""),
        known=(NO_LABEL,),
    ),
    Metric(name="tplr_rollbacks_total", help="Rollbacks after a divergence.", event="rolled_back", read=_one),
    Metric(name="tplr_checkpoints_published_total", help="Checkpoints published.", event="checkpoint", read=_one),
    Metric(name="tplr_checkpoints_restored_total", help="Checkpoints loaded.", event="restored", read=_one),
    # Time
    Metric(
        name="tplr_phase_seconds_total",
        help="Where a node's time goes, by phase.",
        event="window_time",
        read=_phases,
        label="phase",
    ),
    Metric(
        name="tplr_training_time_ratio",
        help="Part of the last window in which this miner trained.",
        event="window_time",
        read=_share_of_training,
    ),
    Metric(
        name="tplr_apply_duration_seconds",
        help="Seconds that the newest window took to apply.",
        event="applied",
        read=_field("seconds"),
    ),
    # Learning
    Metric(
        name="tplr_training_loss_nats",
        help="Mean loss of the last window's batches, nats per token.",
        event="trained",
        read=_field("loss"),
    ),
    Metric(
        name="tplr_held_out_loss_nats",
        help="Loss on a window's held-out pages before its step, nats per token.",
        event="baseline",
        read=_field("held_out_loss"),
    ),
    Metric(name="tplr_trained_tokens_total", help="Tokens trained.", event="trained", read=_field("tokens")),
    Metric(name="tplr_trained_batches_total", help="Batches trained.", event="trained", read=_field("batches")),
    Metric(
        name="tplr_skipped_batches_total",
        help="Batches whose loss or gradient was not finite.",
        event="trained",
        read=_field("skipped"),
    ),
    Metric(
        name="tplr_training_tokens_per_second",
        help="Tokens per second while this miner trained.",
        event="window_time",
        read=_field("tokens_per_second"),
    ),
    Metric(
        name="tplr_model_flops_utilisation_ratio",
        help="Model FLOPs over the device's peak while this miner trained.",
        event="window_time",
        read=_field("model_flops_utilisation"),
    ),
    # Exchange
    Metric(name="tplr_uploaded_bytes_total", help="Bytes of updates uploaded.", event="uploaded", read=_field("bytes")),
    Metric(name="tplr_applied_bytes_total", help="Bytes of updates applied.", event="applied", read=_field("bytes")),
    Metric(
        name="tplr_gather_results_total",
        help="Updates by result: included, or why not.",
        event="applied",
        read=_gather_results,
        label="result",
        known=("included", *Reason),
    ),
    Metric(
        name="tplr_storage_requests_total",
        help="Requests to buckets, by result.",
        event="pulse",
        read=_field("storage_requests"),
        label="result",
        known=("ok", *(error.__name__ for error in STORE_ERRORS)),
    ),
    Metric(name="tplr_aggregates_published_total", help="Aggregates published.", event="aggregated", read=_one),
    Metric(
        name="tplr_peers",
        help="Uids on the newest peer list that this node published, by list.",
        event="peers",
        read=lambda event: {name: len(event[name]) for name in ("peers", "reserve", "probation")},
        label="list",
        replaces=True,
    ),
    # Scores and weights
    Metric(
        name="tplr_score",
        help="This validator's score of each uid.",
        event="scores",
        read=_field("scores"),
        label="uid",
        replaces=True,
    ),
    Metric(
        name="tplr_strikes_total",
        help="Rules that uids were struck by.",
        event="scores",
        read=lambda event: Counter(rule for rules in event["struck"].values() for rule in rules),
        label="rule",
        known=tuple(rule.code for rule in RULES),
    ),
    Metric(
        name="tplr_weight_ratio",
        help="Weight of each uid that this validator set last.",
        event="weights",
        read=_field("weights"),
        label="uid",
        replaces=True,
    ),
    Metric(
        name="tplr_weights_set_timestamp_seconds",
        help="Unix time at which this validator last set weights.",
        event="weights",
        read=_field("time"),
    ),
    # Evaluations, by ``tplr eval``
    Metric(
        name="tplr_evaluated_window",
        help="Newest window whose model was evaluated.",
        event="evaluation",
        read=_field("window"),
    ),
    Metric(
        name="tplr_evaluation_bits_per_byte",
        help="Loss on held-out pages, bits per byte.",
        event="evaluation",
        read=_field("bits_per_byte"),
    ),
    Metric(
        name="tplr_evaluation_result",
        help="Results of tasks, by task and metric, in the task's own unit.",
        event="evaluation",
        read=_task_results,
        label="task",
        replaces=True,
    ),
    # Chain and machine
    Metric(name="tplr_block", help="Newest block seen.", event="pulse", read=_field("block")),
    Metric(
        name="tplr_block_timestamp_seconds",
        help="Unix time at which the newest block was seen.",
        event="pulse",
        read=lambda event: event["time"] - event["block_age"],
    ),
    Metric(
        name="tplr_window_duration_seconds",
        help="Expected length of a window.",
        event="pulse",
        read=_field("window_seconds"),
    ),
    Metric(
        name="tplr_state_free_bytes",
        help="Free bytes on the disk of the saved state.",
        event="pulse",
        read=_field("free_bytes"),
    ),
    Metric(
        name="tplr_memory_bytes",
        help="Memory by what it holds.",
        event="window_time",
        read=_field("memory"),
        label="kind",
        replaces=True,
    ),
    Metric(
        name="tplr_gpu_memory_used_bytes",
        help="Memory in use on each GPU: the most in the window before.",
        event="pulse",
        read=_of_gpus("used_bytes"),
        label="gpu",
        replaces=True,
    ),
    Metric(
        name="tplr_gpu_memory_total_bytes",
        help="Memory of each GPU.",
        event="pulse",
        read=_of_gpus("total_bytes"),
        label="gpu",
        replaces=True,
    ),
    Metric(
        name="tplr_gpu_utilisation_ratio",
        help="Part of the window before in which a kernel ran on each GPU.",
        event="pulse",
        read=_of_gpus("busy"),
        label="gpu",
        replaces=True,
    ),
    Metric(
        name="tplr_gpu_temperature_celsius",
        help="Temperature of each GPU: the highest in the window before.",
        event="pulse",
        read=_of_gpus("celsius"),
        label="gpu",
        replaces=True,
    ),
    Metric(
        name="tplr_gpu_power_watts",
        help="Mean power that each GPU drew in the window before.",
        event="pulse",
        read=_of_gpus("watts"),
        label="gpu",
        replaces=True,
    ),
    Metric(name="tplr_problems_total", help="Problems that the log describes.", event="problem", read=_one),
)
