"""Prints the computed tables of docs/scale.md, as Markdown.

python scripts/scale_tables.py [costs | validator | egress | catch-up]
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from tplr.planner.traffic import DOLLARS_PER_CLASS_B
from tplr.planner.workload import Workload
from tplr.scale.costs import DAY, PARTICIPANTS, Network, cost, measures, sequences_read
from tplr.scale.newcomer import catch_up
from tplr.scale.sizes import BLOCK_SECONDS, SIZES, run_constants, workload

UNION = Path(__file__).parents[1] / "docs" / "benchmarks" / "union.csv"
UIDS = (20, 256, 10_000)
DOWN, UP = 500e6 / 8, 110e6 / 8  # bytes per second
AGGREGATOR_DOWN, AGGREGATOR_UP = 2e9 / 8, 1e9 / 8
NODES = 256
GPU, GPUS, MFU = "h200", 8, 0.4
APPLY = 20.0  # seconds to apply a window during catch-up; an assumption
WINDOW = 100 * BLOCK_SECONDS


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def amount(value: float) -> str:
    """Format a number of bytes."""
    unit, factor = next((one for one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if value >= one[1]), ("kB", 1e3))
    return f"{value / factor:.3g} {unit}"


def costs() -> str:
    """Return the table of each participant's costs, by the number of uids and of parameters."""
    parts = []
    for size in SIZES:
        load = workload(size)
        wait = load.update_bytes / UP
        rows = []
        for who in PARTICIPANTS:
            for uids in UIDS:
                network = Network.of(uids, load.hparams)
                one = cost(load, who, network, wait=wait, until_decided=10.0)
                rows.append(
                    [
                        who,
                        f"{uids:,}",
                        f"{one.reads:,.0f}",
                        f"{one.lists:,.0f}",
                        f"{one.writes:,.0f}",
                        f"{one.served_reads:,.0f}",
                        f"{one.served_lists:,.0f}",
                        f"{one.dollars_a_day(WINDOW):.3f}",
                        amount(one.down),
                        amount(one.up),
                        f"{one.down / DOWN / WINDOW:.0%}",
                        f"{one.cpu:,.0f}",
                        amount(one.memory),
                    ]
                )
        head = (
            "participant", "uids", "reads", "lists", "own writes, lists", "served reads", "served lists", "$ a day",
            "down", "up", "of 500 Mbit/s", "hashing, s", "updates in memory",
        )  # fmt: skip
        parts.append(f"**{size}**: an update has {amount(load.update_bytes)}.\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def validator() -> str:
    """Return the table of the seconds of a validator's devices and link."""
    rows = []
    for size in SIZES:
        for uids, bounded in ((256, None), (256, 20)):
            load = workload(size)
            network = Network.of(uids, load.hparams, probation=bounded)
            measured = load.hparams.max_topk_peers + load.hparams.reserve_peers + network.probation
            tested = max(8, measured // 3)
            one = cost(load, "validator", network, wait=load.update_bytes / UP, until_decided=10.0)
            row = [size, measured, tested]
            for rate in (0.1, 0.01):
                run = Workload.of(run_constants(size, validator_sample_rate=rate))
                found = measures(run, tested=tested, sequences=sequences_read(run), gpu=GPU, gpus=GPUS, mfu=MFU)
                row += [sequences_read(run), f"{found.seconds:,.0f}"]
            rows.append([*row, amount(one.down), f"{one.down / DOWN:,.0f}", f"{one.down / (2e9 / 8):,.0f}"])
    head = (
        "size", "measured uids", "tested", "sequences at a rate of 0.1", "devices, s", "at 0.01", "devices, s",
        "fetched", "link, s at 500 Mbit/s", "at 2 Gbit/s",
    )  # fmt: skip
    return table(head, rows)


WAYS = (
    "way", "a node fetches", "from, s", "has it, s", "a sender sends", "all fetch", "reads, $ a day", "verified by",
)  # fmt: skip


class Way(NamedTuple):
    """A way to bring a window's updates to all nodes.

    Attributes:
        fetched: bytes that a node fetches; ``ready``: seconds from the window's end until it can fetch them.
        sent: bytes that one sender uploads.
    """

    name: str
    fetched: float
    ready: float
    sent: float
    requests: int
    proof: str

    def row(self) -> list[str]:
        reads = NODES * self.requests * DOLLARS_PER_CLASS_B * DAY / WINDOW
        return [
            self.name,
            amount(self.fetched),
            f"{self.ready:,.0f}",
            f"{self.ready + self.fetched / DOWN:,.0f}",
            amount(self.sent),
            amount(self.fetched * NODES),
            f"{reads:.2f}",
            self.proof,
        ]


def egress() -> str:
    """Return the table of the ways to bring a window's updates to 256 nodes."""
    with UNION.open() as file:
        last = [row for row in csv.DictReader(file) if int(row["updates"]) == 20 and int(row["window"]) > 1]
    bits = {name: mean(float(row[name]) for row in last) for name in last[0]}
    parts = []
    for size in SIZES:
        load = workload(size)
        update, whole = load.update_bytes, 20.0 * load.update_bytes
        exact, lossy = (whole * bits[name] / bits["end to end"] for name in ("sum, float32", "sum, 8 bits"))
        four = whole * bits["sum, 4 bits"] / bits["end to end"]
        sent = update / UP
        aggregator = sent + whole / AGGREGATOR_DOWN
        ways = [
            Way("peers' buckets", whole, sent, update, 20, "hash of each"),
            Way(
                "one aggregate, by a node at 110 Mbit/s",
                whole,
                sent + whole / DOWN + whole / UP,
                whole,
                1,
                "hash of each",
            ),
            Way("one aggregate, by an aggregator", whole, aggregator + whole / AGGREGATOR_UP, whole, 1, "hash of each"),
            Way(
                "four mirrors, a quarter each",
                whole,
                sent + whole / DOWN + whole / 4 / UP,
                whole / 4,
                4,
                "hash of each",
            ),
        ]
        for name, weight in (("exact sum", exact), ("sum at 8 bits", lossy), ("sum at 4 bits", four)):
            ready = aggregator + weight / AGGREGATOR_UP
            ways.append(Way(f"{name}, by an aggregator", weight, ready, weight, 1, "electors recompute it"))
        rows = [one.row() for one in ways]
        parts.append(f"**{size}**\n\n{table(WAYS, rows)}")
    share = f"{bits['share']:.1%} of all entries are sent by anybody; {bits['end to end']:.2f} bits end to end, "
    share += (
        f"{bits['sum, float32']:.2f} exact, {bits['sum, 8 bits']:.2f} and {bits['sum, 4 bits']:.2f} at 8 and 4 bits."
    )
    return "\n\n".join([share, *parts])


def catching_up() -> str:
    """Return the table of a newcomer's times, by the age of the checkpoint that it finds."""
    rows = []
    for size in ("8B", "70B"):
        load = workload(size)
        checkpoint = 4.0 * load.parameters
        for frequency in (100, 20, 5):
            for up, name in ((UP, "110 Mbit/s"), (1e9 / 8, "1 Gbit/s")):
                upload = checkpoint / up / WINDOW
                hparams = run_constants(size, checkpoint_frequency=frequency)
                # A checkpoint is sent until the next one is due: an elector skips checkpoints that it has no time to
                # send.
                every = math.ceil(upload / frequency) * frequency
                ages = [math.ceil(upload), math.ceil(upload + every)]
                found = [
                    catch_up(
                        hparams,
                        behind=10_000,
                        checkpoint=checkpoint,
                        update=load.update_bytes,
                        rate=DOWN,
                        window_seconds=WINDOW,
                        apply=APPLY,
                        checkpoint_age=age,
                    )
                    for age in ages
                ]
                rows.append(
                    [
                        size,
                        frequency,
                        name,
                        amount(checkpoint),
                        f"{upload:.1f}",
                        f"{found[0].restored / 3600:.1f}",
                        *(f"{one.seconds / 3600:.1f} h, {one.windows}" for one in found),
                        amount(found[1].fetched),
                    ]
                )
    head = (
        "size", "windows between two", "elector's uplink", "checkpoint", "windows to send it", "to fetch it, h",
        "best: until caught up, windows replayed", "worst", "fetched, worst",
    )  # fmt: skip
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "validator": validator,
    "egress": egress,
    "catch-up": catching_up,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[*TABLES, []], default=[])
    for name in parser.parse_args().which or TABLES:
        print(f"## {name}\n\n{TABLES[name]()}\n")


if __name__ == "__main__":
    main()
