"""Describes hosts: a node's hardware by name, by arguments, or as detected."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.resources import LocalMachine

if TYPE_CHECKING:
    import torch

GB, GIB = 10**9, 2**30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device.

    Attributes:
        memory: bytes that a program can allocate.
        bandwidth: memory bandwidth, bytes per second.
        peak: peak rate of dense bfloat16 matrix products, FLOP per second.
    """

    name: str
    memory: int
    bandwidth: float
    peak: float


# Data sheets of the vendor: memory as its driver reports it, dense bfloat16 without sparsity.
ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator(name="rtx4090", memory=24 * GIB, bandwidth=1.008e12, peak=165.2e12),
        Accelerator(name="l40s", memory=45 * GIB, bandwidth=0.864e12, peak=362e12),
        Accelerator(name="a100-40gb", memory=40 * GIB, bandwidth=1.555e12, peak=312e12),
        Accelerator(name="a100-80gb", memory=80 * GIB, bandwidth=2.039e12, peak=312e12),
        Accelerator(name="h100", memory=80 * GIB, bandwidth=3.35e12, peak=989.5e12),
        Accelerator(name="h200", memory=140 * GIB, bandwidth=4.8e12, peak=989.5e12),
        Accelerator(name="b200", memory=180 * GIB, bandwidth=8.0e12, peak=2250e12),
    )
}

# Words in a driver's name of a slower variant, or of a part, of the same accelerator.
SLOWER = frozenset({"pcie", "nvl", "laptop", "d", "mig", "grid"})


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host with equal devices; ``accelerator`` is None for a node that computes on the CPU.

    Attributes:
        ranks: number of the node's processes, one for each device.
        host_memory, disk: bytes.
        down, up: rates of its link, bits per second.
    """

    accelerator: Accelerator | None
    ranks: int = 1
    host_memory: int
    disk: int
    down: float
    up: float

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.accelerator.name}" if self.accelerator else f"{self.ranks} x CPU"

    @property
    def device_memory(self) -> int:
        """Bytes of memory for each rank: its device's, or its share of the host's."""
        return self.accelerator.memory if self.accelerator else self.host_memory // self.ranks

    @classmethod
    def here(cls, device: torch.device, folder: Path, *, ranks: int = 1, down: float, up: float) -> Host:
        """Describe this host. ``folder`` is on the disk of the node's state."""
        import torch  # not for the names alone

        accelerator = None
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            name = torch.cuda.get_device_name(device)
            known = known_accelerator(name)
            accelerator = Accelerator(
                name=name,
                memory=total,
                bandwidth=known.bandwidth if known else 1e12,
                peak=known.peak if known else 100e12,
            )
        return cls(
            accelerator=accelerator,
            ranks=ranks,
            host_memory=LocalMachine.here().memory,
            disk=shutil.disk_usage(_existing(folder)).free,
            down=down,
            up=up,
        )


def known_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator with the driver's name ``name``; None if its figures are not known."""
    words = re.split(r"[\s-]+", name.lower().replace("rtx ", "rtx"))
    if SLOWER.intersection(words) or any(re.fullmatch(r"\d+[abcq]", word) for word in words):  # 48q: a virtual GPU
        return None
    return next((one for key, one in ACCELERATORS.items() if {*key.split("-")} <= {*words}), None)


def _existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest existing folder above it."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
