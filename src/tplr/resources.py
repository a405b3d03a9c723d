"""Chooses how many threads and concurrent transfers a process uses, from its cores, memory and device."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from tplr.errors import ConfigError

NO_LIMIT = 2**63
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_TRANSFER_BYTES = 64 * 2**20  # a page's column chunk, texts and tokens, with a margin for long row groups
_THREAD_BYTES = 256 * 2**20  # memory of a decoding and tokenizing thread; about 50 MiB were measured
_MOST_TRANSFERS = 32  # of one node; R2 answers more with 429 and 5xx
_MOST_DATA_THREADS = 16  # part of the work holds the GIL
_PART_BYTES = 16 * 2**20  # a part of a checkpoint; a few MiB of it are in memory
_MOST_PARTS = 16  # of one checkpoint; R2 answers more with 429
_PEER_BYTES = 16 * 2**20  # a peer's object and its parsed form
_MOST_PEERS = 128


@dataclass(frozen=True)
class LocalMachine:
    """The resources of its machine that a process may use.

    Attributes:
        cores: by affinity and the control group's quota, divided among the processes of one ``torchrun``.
        memory: in bytes; the machine's, or the control group's limit.
        device: type of the device that trains, such as ``cuda``.
    """

    cores: int
    memory: int
    device: str = "cpu"

    @classmethod
    def here(cls, device: str = "cpu") -> Self:
        """Return the resources of this process."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(available_cores(), min(memory, cgroup_memory()), device)


@dataclass(frozen=True)
class Resources:
    """The concurrency limits of a process.

    Attributes:
        transfers: number of pages, or blocks of a store, that are fetched at once.
        data_threads: number of threads that decode and tokenize.
        tensor_threads: number of PyTorch threads on the CPU.
        checkpoint_parts: number of parts of a large object, such as a checkpoint, that are sent or fetched at once.
        gather_peers: number of peers whose objects are fetched at once. With at least 64, which is more than a peer
            list, no peer waits for the slot of a stalled bucket.
    """

    transfers: int
    data_threads: int
    tensor_threads: int
    checkpoint_parts: int
    gather_peers: int

    @classmethod
    def choose(cls, machine: LocalMachine, variables: Mapping[str, str], **given: int) -> Self:
        """Choose limits for a machine; ``given`` overrides fields, and variables ``TPLR_`` + field name override both.

        PyTorch's ``OMP_NUM_THREADS`` counts as given for ``tensor_threads``.

        Raises:
            ConfigError: variables, or ``LOCAL_WORLD_SIZE``, are not numbers from 1 on; lists all of them.
        """
        chosen = asdict(cls.of(machine)) | given
        names = {"OMP_NUM_THREADS": "tensor_threads"} | {f"TPLR_{f.name.upper()}": f.name for f in fields(cls)}
        problems = []
        for name, field in names.items():
            value = variables.get(name, "").strip()
            if value.isdecimal() and int(value):
                chosen[field] = int(value)
            elif value and name.startswith("TPLR_"):
                problems.append(f"{name} is {value!r}: expected a whole number from 1 on, or unset")
        try:
            local_processes(variables)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return cls(**chosen)

    @classmethod
    def of(cls, machine: LocalMachine) -> Self:
        """Return the default limits for a machine."""
        cores = machine.cores
        # With an accelerator and three or more cores, one core is reserved for the thread that feeds it.
        free = cores if machine.device == "cpu" else max(min(cores, 2), cores - 1)
        return cls(
            transfers=_clamp(4 * cores, 8, min(_MOST_TRANSFERS, machine.memory // _TRANSFER_BYTES)),
            data_threads=_clamp(free, 1, min(_MOST_DATA_THREADS, machine.memory // _THREAD_BYTES)),
            tensor_threads=cores,
            checkpoint_parts=_clamp(2 * cores, 4, min(_MOST_PARTS, machine.memory // _PART_BYTES)),
            gather_peers=_clamp(32 * cores, 64, min(_MOST_PEERS, machine.memory // _PEER_BYTES)),
        )

    def describe(self, machine: LocalMachine) -> str:
        """Return the limits as one line for the log."""
        return (
            f"{machine.cores} cores, {machine.memory // 2**30} GiB, device {machine.device}: "
            f"{self.transfers} transfers, {self.data_threads} data threads, {self.tensor_threads} tensor threads, "
            f"{self.checkpoint_parts} checkpoint parts, {self.gather_peers} peers"
        )


def available_cores() -> int:
    """Return the number of cores that this process may use, divided among the processes of one ``torchrun``.

    A wrong ``LOCAL_WORLD_SIZE`` counts as 1, because imports call this; ``Resources.choose`` reports it.
    """
    cores = min(len(os.sched_getaffinity(0)), cgroup_cores())
    try:
        return max(1, cores // local_processes(os.environ))
    except ConfigError:
        return cores


def local_processes(variables: Mapping[str, str]) -> int:
    """Return ``LOCAL_WORLD_SIZE``: number of processes of ``torchrun`` on this machine; 1 without it.

    Raises:
        ConfigError: it is not a number from 1 on.
    """
    value = variables.get("LOCAL_WORLD_SIZE") or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE is {value!r}: expected the number of processes on this machine, as torchrun sets it"
        )
    return int(value)


def cgroup_cores(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Return the number of cores of the control groups' quota, rounded up; ``NO_LIMIT`` without a quota."""
    quotas = [text.split() for text in _settings("cpu", "cpu.max", root, own)]
    both = zip(*(_settings("cpu", f"cpu.cfs_{name}_us", root, own) for name in ("quota", "period")), strict=False)
    limits = [(int(quota), int(period)) for quota, period in [*quotas, *both] if quota not in ("max", "-1")]
    return min((-(-quota // period) for quota, period in limits), default=NO_LIMIT)


def cgroup_memory(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Return the bytes that the control groups may use; ``NO_LIMIT`` without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [text for name in names for text in _settings("memory", name, root, own)]
    return min((int(text) for text in limits if text != "max"), default=NO_LIMIT)


def _settings(controller: str, name: str, root: Path, own: Path) -> list[str]:
    """Read a setting of this process's control group (version 2 or 1) and of its parent groups that have it."""
    folders = set[Path]()
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                top = root / controller if controllers else root
                group = top / path.lstrip("/")
                folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(top)}
        files = [folder / name for folder in sorted(folders)]
        return [file.read_text().strip() for file in files if file.exists()]
    except OSError:
        return []


def _clamp(value: int, least: int, most: int) -> int:
    return max(1, min(max(value, least), most))
