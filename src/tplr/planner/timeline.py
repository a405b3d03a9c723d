"""Models a node's window as intervals: of a miner also the share of it in which the devices train.

The model of a miner: all peers have links like this machine's and upload at the same time, so the download of all
updates begins when this miner's own upload ends. The miner waits for the published set until the time bound. Training
starts when the window's aggregate is applied and stops ``commit_margin_seconds`` before the window's end.

With ``outer_delay`` 1 the devices train during the exchange. They pause while an update is packed and while the
aggregate is applied, and in both cases for copies to and from host memory. If the aggregate arrives after the next
update is packed, the next training waits for it.

A validator does not train. The times of its transfers at the full rate of its links are compared with the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.planner.host import Host
from tplr.planner.traffic import Traffic, updates_fetched
from tplr.planner.workload import Workload
from tplr.schemas import UploadBounds
from tplr.training.device import DEFAULTS, DeviceSettings

# Bytes per parameter at the device's bandwidth, and seconds per tensor in which a device waits for the host; see
# docs/plan.md for how well they are known.
OUTER_BYTES, OUTER_SECONDS = 120.0, 15e-3
PACK_BYTES, PACK_SECONDS = 260.0, 2.4e-3
# Rate of each rank to pinned host memory, bytes per second; PCIe 5 with 16 lanes reaches 50 to 57 GB/s.
HOST_COPY = 40e9
CPU_BANDWIDTH, CPU_PEAK = 20e9, 100e9


@dataclass(frozen=True)
class Phase:
    """An interval of a window, in seconds from its start."""

    name: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A window.

    Attributes:
        window: its length in seconds.
        phases: training, and the phases that keep the devices from training; () for a node that does not train.
        links: uploads and downloads, concurrent with the phases.
        needed: seconds of training for all of the window's tokens; 0 for a node that does not train.
        problems: reasons why this cannot work, as full sentences.
    """

    window: float
    phases: tuple[Phase, ...]
    links: tuple[Phase, ...]
    needed: float
    problems: tuple[str, ...]

    @property
    def training(self) -> float:
        """Seconds of training."""
        return sum(phase.seconds for phase in self.phases if phase.name == "train")

    @property
    def utilisation(self) -> float:
        """Share of the window in which the devices train."""
        return self.training / self.window

    @property
    def binds(self) -> str:
        """Name of the limit on the number of tokens that a window trains on; only of a node that trains."""
        if self.needed < self.training * 1.000001:
            return "data: the window's batches end before its time"
        waits = {phase.name: phase.seconds for phase in self.phases if phase.name != "train"}
        longest = max(waits, key=lambda name: waits[name])
        if self.training >= 0.5 * self.window:
            return "compute: the devices train until the window's end"
        return f"{longest}: {waits[longest]:.0f} s of {self.window:.0f} s"


def miner_timeline(
    load: Workload, host: Host, *, window: float, mfu: float, settings: DeviceSettings = DEFAULTS
) -> Timeline:
    """Compute a miner's window of ``window`` seconds on ``host``, with model FLOPs utilisation ``mfu``."""
    hparams = load.hparams
    upload = load.update_bytes * 8 / host.up
    download = load.update_bytes * 8 * updates_fetched(hparams, "miner") / host.down
    bandwidth = host.accelerator.bandwidth if host.accelerator else CPU_BANDWIDTH
    peak = host.accelerator.peak if host.accelerator else CPU_PEAK
    shard = load.parameters / host.ranks
    tensors = len(load.tensors) / host.ranks if host.accelerator else 0.0  # a CPU does not wait for its host
    apply = OUTER_BYTES * shard / bandwidth + OUTER_SECONDS * tensors
    pack = PACK_BYTES * shard / bandwidth + PACK_SECONDS * tensors
    needed = (load.tokens * load.flops_per_token + load.muon_flops) / (host.ranks * mfu * peak)

    copies = _copies(load, settings) * shard / HOST_COPY if host.accelerator else 0.0

    bound = hparams.time_window_delta_seconds
    uploaded = UploadBounds.resolution + upload
    gathered = uploaded + download
    ready = max(gathered, bound + STORE_CLOCK_SECONDS) if hparams.manifest_timeout_seconds else gathered
    stop = window - hparams.commit_margin_seconds
    if hparams.outer_delay:
        # Each pause has half of the copies.
        phases = _overlapped(window, stop=stop, ready=ready, pack=pack + copies / 2, apply=apply + copies / 2)
        idle = sum(phase.seconds for phase in phases if phase.name == "train") - needed
        phases = _with_idle(phases, idle) if idle > 0 else phases
    else:
        begin = min(ready + apply, stop)
        end = min(begin + needed, stop)
        phases = [Phase("gather", 0.0, min(gathered, stop)), Phase("wait for the set", gathered, ready)]
        phases += [Phase("apply", ready, begin), Phase("train", begin, end), Phase("idle", end, stop)]
        phases += [Phase("pack, commit", stop, window)]
    return Timeline(
        window=window,
        phases=tuple(phase for phase in phases if phase.seconds > 0),
        links=(Phase("upload", UploadBounds.resolution, uploaded), Phase("download", uploaded, gathered)),
        needed=needed,
        problems=tuple(_problems(load, host, uploaded=uploaded, ready=ready + apply, window=window, pack=pack)),
    )


def validator_timeline(flow: Traffic, host: Host, *, window: float) -> Timeline:
    """Compute a validator's window of ``window`` seconds on ``host``: how long each direction of its link is busy."""
    links, problems = [], []
    for name, size, rate in (("upload", flow.uploaded, host.up), ("download", flow.downloaded, host.down)):
        link = Phase(name, 0.0, size * 8 / rate)
        links.append(link)
        if link.seconds > window:
            problems.append(
                f"the {name} of {size / 1e6:.0f} MB in a window takes {link.seconds:.0f} s at {rate / 1e6:g} Mbit/s, "
                f"a window has {window:.0f} s: use a link of at least {math.ceil(size * 8 / window / 1e6)} Mbit/s, or "
                "raise blocks_per_window"
            )
    return Timeline(window=window, phases=(), links=tuple(links), needed=0.0, problems=tuple(problems))


def _overlapped(window: float, *, stop: float, ready: float, pack: float, apply: float) -> list[Phase]:
    """Return the phases with ``outer_delay`` 1: training begins before the window; its end belongs to the next one."""
    packed = min(stop + pack, window)
    if ready <= stop:
        applied = min(ready + apply, stop)
        phases = [Phase("train", 0.0, ready), Phase("apply", ready, applied), Phase("train", applied, stop)]
        phases += [Phase("pack", stop, packed), Phase("train", packed, window)]
    else:
        ready = min(max(ready, packed), window)
        applied = min(ready + apply, window)
        phases = [Phase("train", 0.0, stop), Phase("pack", stop, packed), Phase("gather", packed, ready)]
        phases += [Phase("apply", ready, applied), Phase("train", applied, window)]
    return phases


def _with_idle(phases: list[Phase], idle: float) -> list[Phase]:
    """Mark idle time if the batches end before the time: the last seconds of training before packing first."""
    pack = next(index for index, phase in enumerate(phases) if phase.name == "pack")
    for index in (*range(pack - 1, -1, -1), *range(len(phases) - 1, pack, -1)):
        phase = phases[index]
        if phase.name == "train" and idle > 0:
            cut = max(phase.start, phase.stop - idle)
            idle -= phase.stop - cut
            phases[index : index + 1] = [Phase("train", phase.start, cut), Phase("idle", cut, phase.stop)]
    return phases


def _copies(load: Workload, settings: DeviceSettings) -> float:
    """Return the bytes per parameter copied between a device and its host in a window with ``outer_delay`` 1.

    Moments are copied for the saved state. Training starts and ends twice, so offloaded weights are copied twice each
    way, and an offloaded error feedback four times to the device, if the weights are moved by a share of it.
    """
    moments = 2 - sum(load.tensors[name] for name in load.muon) / load.parameters
    constants = load.hparams.sparseloco
    moved = settings.offload_error_feedback and constants is not None and constants.expected_share > 0
    return 4.0 * moments + (16.0 if settings.offload_weights else 0.0) + (16.0 if moved else 0.0)


def _problems(load: Workload, host: Host, *, uploaded: float, ready: float, window: float, pack: float) -> list[str]:
    hparams, problems = load.hparams, []
    stop = window - hparams.commit_margin_seconds
    if uploaded > hparams.time_window_delta_seconds:
        problems.append(
            f"an update of {load.update_bytes / 1e6:.0f} MB takes {uploaded:.0f} s at {host.up / 1e6:.0f} Mbit/s, "
            f"time_window_delta_seconds is {hparams.time_window_delta_seconds:g}: raise the bound, use a faster link, "
            "or send less (topk_compression, quantization_bits)"
        )
    last, what = (window, "the window") if hparams.outer_delay else (stop, "training")
    if ready >= last:
        problems.append(
            f"the window's updates are applied {ready:.0f} s after its start, and {what} ends {last:.0f} s after it: "
            "no time to train; raise blocks_per_window, or use a faster link"
        )
    if pack > hparams.commit_margin_seconds:
        problems.append(
            f"packing takes {pack:.0f} s, commit_margin_seconds is {hparams.commit_margin_seconds:g}: raise it"
        )
    return problems
