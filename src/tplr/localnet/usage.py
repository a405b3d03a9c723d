"""Measures memory and processor time of a localnet's processes, as counted by Linux."""

import csv
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Resource use of a process after ``windows`` windows of the run.

    Attributes:
        rss: bytes of resident memory, with shared pages counted in full.
        pss: the same, but a page that n processes share counts 1/n, so the sum over all processes is their total.
        uss: bytes that no other process shares: they are freed when it ends.
        cpu: seconds of processor time since its start, including its ended children.
    """

    windows: int
    name: str
    rss: int
    pss: int
    uss: int
    cpu: float


def read_usage(pids: Mapping[str, int], *, windows: int, proc: Path = Path("/proc")) -> list[Usage]:
    """Return the usage of each running process, in the order of ``pids``; nothing on systems other than Linux."""
    found = [_of(name, pid, windows, proc) for name, pid in pids.items()]
    return [one for one in found if one is not None]


def write_usage(path: Path, rows: Iterable[Usage]) -> None:
    """Write a CSV file: a row for each process and window."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Usage)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _of(name: str, pid: int, windows: int, proc: Path) -> Usage | None:
    try:
        rows = (proc / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        # The fields follow the program's name in brackets, which may contain any character.
        status = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is no Linux
        return None
    sizes = {key: int(value.split()[0]) * 1024 for key, _, value in (row.partition(":") for row in rows)}
    ticks = sum(int(one) for one in status[11:15])  # user and system, and of children that it waited for
    return Usage(
        windows=windows,
        name=name,
        rss=sizes["Rss"],
        pss=sizes["Pss"],
        uss=sizes["Private_Clean"] + sizes["Private_Dirty"],
        cpu=ticks / TICKS_PER_SECOND,
    )
