"""A plan: all needs of a run on a host, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from tplr.errors import ConfigError
from tplr.hparams import HParams
from tplr.planner.host import Host
from tplr.planner.memory import Memory, Role, device_memory
from tplr.planner.timeline import Timeline, miner_timeline, validator_timeline
from tplr.planner.traffic import Traffic, traffic
from tplr.planner.workload import TOKENS_PER_PAGE, Workload
from tplr.training.device import DeviceSettings

# Above this share of a device's memory, an allocator that rounds and fragments eventually fails.
USABLE = 0.94
SMALL_LOSS_ROWS = 1024  # fewer rows save little, because the gradient of the last layer is whole anyway
SNAPSHOTS = 3  # two complete saved states, and the one being written; a checkpoint is fetched beside the older one


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the attributes' own types.

    Attributes:
        disk: number of bytes of saved states.
    """

    load: Workload
    host: Host
    role: Role
    settings: DeviceSettings
    mfu: float
    memory: Memory
    disk: int
    traffic: Traffic
    timeline: Timeline

    @property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit, with remedies; [] if it fits."""
        return [*self.memory_problems, *self.timeline.problems]

    @property
    def memory_problems(self) -> list[str]:
        """The part of ``problems`` that depends only on the machine's memory and disk."""
        here, memory, found = self.host, self.memory, []
        if memory.peak > USABLE * here.device_memory:
            kind = max(memory.device, key=lambda name: memory.device[name])
            found.append(
                f"each of {here.ranks} ranks needs {memory.peak / 2**30:.1f} GiB, {USABLE:.0%} of its "
                f"{here.device_memory / 2**30:.1f} GiB can be used; the largest part is {kind} with "
                f"{memory.device[kind] / 2**30:.1f} GiB: {self._remedy()}"
            )
        host = sum(memory.host.values())
        if here.accelerator is None:
            host += memory.peak * here.ranks
        if host > USABLE * here.host_memory:
            found.append(
                f"the host needs {host / 2**30:.1f} GiB, it has {here.host_memory / 2**30:.1f} GiB: use a smaller "
                "model, fewer ranks, or more memory"
            )
        if self.disk > here.disk:
            found.append(
                f"saved states take {self.disk / 2**30:.1f} GiB, the disk has {here.disk / 2**30:.1f} GiB free: "
                "make room, or give --state on another disk"
            )
        return found

    def _remedy(self) -> str:
        steps = [f"torchrun with more than {self.host.ranks} ranks"]
        if self.settings.checkpointing != "full":
            steps.append("activation checkpointing")
        if {"error feedback", "weights before"} & self.memory.device.keys():
            steps.append("offload")
        if self.settings.loss_rows > SMALL_LOSS_ROWS:
            steps.append(f"--loss-rows {SMALL_LOSS_ROWS}")
        return ", ".join([*steps, "a smaller batch_size"])

    def check(self) -> None:
        """Raise ConfigError if memory or disk are not sufficient."""
        if problems := self.memory_problems:
            raise ConfigError([f"{self.host.name}: {problem}" for problem in problems])


def make_plan(
    hparams: HParams,
    host: Host,
    *,
    role: Role = "miner",
    settings: DeviceSettings | None = None,
    block_time: float = 12.0,
    mfu: float = 0.4,
    readers: int = 20,
    tokens_per_page: int = TOKENS_PER_PAGE,
) -> Plan:
    """Plan a run.

    Args:
        block_time: the chain's block time, seconds.
        mfu: model FLOPs utilisation while the devices train; an assumption until it is measured on the host.
        readers: number of nodes that gather a miner's update in each window.
        tokens_per_page: mean number of tokens per page of the dataset.
    """
    settings = settings or DeviceSettings.of("cuda" if host.accelerator else "cpu")
    load = Workload.of(hparams, tokens_per_page=tokens_per_page)
    on_cpu = host.accelerator is None
    memory = device_memory(load, role, settings, ranks=host.ranks, on_cpu=on_cpu)
    kept = load.shared_bytes
    if role == "miner":
        moments = 2 * load.parameters - sum(load.tensors[name] for name in load.muon)
        kept += 4 * load.parameters + (4 * moments if hparams.sparseloco else 0)
    flow = traffic(load, role, readers=readers)
    window = hparams.blocks_per_window * block_time
    return Plan(
        load=load,
        host=host,
        role=role,
        settings=settings,
        mfu=mfu,
        memory=memory,
        disk=SNAPSHOTS * kept,
        traffic=flow,
        timeline=(
            miner_timeline(load, host, window=window, mfu=mfu, settings=settings)
            if role == "miner"
            else validator_timeline(flow, host, window=window)
        ),
    )
