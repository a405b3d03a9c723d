"""The checks of a node's start: each raises an error that names a problem and its remedy."""

from __future__ import annotations

import asyncio
import math
import shutil
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from tplr.chain import Chain
from tplr.chain.base import Neuron
from tplr.chain.commitment import encode_commitment
from tplr.chain.manager import FINAL_AFTER_BLOCKS
from tplr.config import process_variables
from tplr.errors import ChainUnavailable, ConfigError, NotRegistered, StoreError, StoreUnavailable
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.files import atomic_write
from tplr.folder_lock import sole_user
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.arguments import Arguments
from tplr.node.state import StateFolder
from tplr.planner.host import Host
from tplr.planner.plan import Plan, make_plan
from tplr.schemas import Bucket
from tplr.storage import ObjectStore
from tplr.storage.probe import RETRY_SECONDS, ProbeResult, probe_access
from tplr.storage.retry import with_retry
from tplr.training.device import DeviceSettings

# No decision depends on this machine's clock, but S3 refuses requests whose time is off by more than 15 minutes.
MAX_SKEW_SECONDS = 300.0
HICCUP_SECONDS = 1.0  # pause before the chain is asked again

T = TypeVar("T")


def check_state_folder(folder: Path) -> None:
    """Raise StateError if ``folder`` can't be written."""
    atomic_write(folder / "writable", b"")


def sole_node(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which no other process runs a node with this state; it raises ConfigError if one does.

    Two nodes of one hotkey would replace each other's commits, updates and snapshots.
    """
    remedy = "stop that node: two nodes of one hotkey overwrite each other's updates and saved states"
    return sole_user(folder, ".lock", what="state", remedy=remedy)


def check_fits(hparams: HParams, args: Arguments, device: torch.device, ranks: int = 1) -> Plan:
    """Return the plan of this run. Raises ConfigError if it needs more memory or disk than this machine has."""
    role = "validator" if args.role == "validator" else "miner"
    # The link's speed is not known yet, and a slow link is no reason to refuse a start.
    here = Host.here(device, args.state_folder, ranks=ranks, down=math.inf, up=math.inf)
    # The saved states that are there make room for the next ones.
    here = replace(here, disk=here.disk + StateFolder(args.state_folder).size)
    plan = make_plan(hparams, here, role=role, settings=args.device_settings)
    plan.check()
    return plan


def check_compiler(device: torch.device, settings: DeviceSettings) -> None:
    """Raise ConfigError if ``settings`` compile the model and this machine lacks what the compiler of ``device`` needs.

    Otherwise the node would crash in its first window: Triton builds the launchers of a GPU's kernels with the C
    compiler and Python's headers, and kernels of a CPU are C++.
    """
    if not settings.compile:
        return
    gpu = device.type == "cuda"
    variable, names = ("CC", ("gcc", "clang")) if gpu else ("CXX", ("g++",))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    problems = []
    if not any(map(shutil.which, [process_variables().get(variable, ""), *names])):
        problems.append(f"--compile finds no compiler: install {names[0]}, set {variable}, or give --no-compile")
    if gpu and not header.exists():
        problems.append(f"--compile needs {header}: install Python's headers (python3-dev), or give --no-compile")
    if problems:
        raise ConfigError(problems)


def check_window(hparams: HParams, block_time: float) -> None:
    """Raise ConfigError if a window leaves no time to train after the wait for a missing update.

    Otherwise one missed update would cause the next: a node that waits for it would itself finish late.
    """
    length = hparams.blocks_per_window * block_time
    waiting = hparams.time_window_delta_seconds + STORE_CLOCK_SECONDS + hparams.commit_margin_seconds
    waiting += hparams.manifest_timeout_seconds
    if length <= waiting:
        raise ConfigError(
            f"a window of {hparams.blocks_per_window} blocks of {block_time:g} s leaves no time to train: "
            f"time_window_delta_seconds {hparams.time_window_delta_seconds:g}, {STORE_CLOCK_SECONDS:g} s for the "
            f"store's clock, manifest_timeout_seconds {hparams.manifest_timeout_seconds:g} and commit_margin_seconds "
            f"{hparams.commit_margin_seconds:g} take {waiting:g} s of its {length:g} s"
        )


def check_committable(bucket: Bucket) -> None:
    """Raise ConfigError if the bucket does not fit into the chain's commitment of 128 characters."""
    try:
        encode_commitment(bucket)
    except ValueError as error:
        raise ConfigError(f"R2_GRADIENTS_*: {error}") from error


async def check_answers(stores: Sequence[ObjectStore]) -> None:
    """Raise StoreUnavailable if none of a dataset's replicas answers; an error response is an answer."""

    async def ask(store: ObjectStore) -> StoreUnavailable | None:
        try:
            await with_retry(lambda: store.head("probe-of-latency"), deadline_seconds=RETRY_SECONDS)
        except StoreUnavailable as error:
            return error
        except StoreError:
            pass
        return None

    if all(errors := await asyncio.gather(*map(ask, stores))):
        raise StoreUnavailable(f"the dataset's bucket does not answer: check the network and try again: {errors[0]}")


async def check_access(readable: ObjectStore, writable: ObjectStore, *, variables: str, published: bool = True) -> None:
    """Check both keys of a bucket: the write key must write; a ``published`` read key must read, and not write.

    Raises:
        ConfigError: a key is wrong; the text names each problem and the ``variables`` to check.
        StoreUnavailable: the keys could not be checked, because the server does not answer.
    """
    findings = await probe_access(readable, writable, variables=variables, published=published)
    problems = [found for found in findings if found.verdict is ProbeResult.PROBLEM]
    texts = [f"{found.found}; {found.remedy}" for found in problems]
    if problems and all(found.outside for found in problems):
        raise StoreUnavailable(texts[0])
    if problems:
        raise ConfigError(texts)


async def check_registration(chain: Chain, args: Arguments) -> Neuron:
    """Return this hotkey's neuron. Raises NotRegistered if it has no uid on the subnet."""
    metagraph = await chain.metagraph()
    neuron = next((one for one in metagraph.neurons if one.hotkey == chain.hotkey), None)
    if neuron is None:
        raise NotRegistered(
            f"hotkey {args.wallet_hotkey} ({chain.hotkey}) has no uid on subnet {args.netuid}: register it, "
            f"or give another --wallet.name, --wallet.hotkey or --netuid"
        )
    return neuron


async def check_clock(chain: Chain) -> None:
    """Raise ConfigError if this machine's clock differs by more than ``MAX_SKEW_SECONDS`` from the chain's."""
    # The head may still be replaced, and block 0 has no time.
    block = await chain.block(max(1, await chain.head() - FINAL_AFTER_BLOCKS))
    skew = time.time() - block.time
    # Skipped slots make the block older than its distance from the head implies.
    if not -MAX_SKEW_SECONDS < skew < MAX_SKEW_SECONDS + 2 * FINAL_AFTER_BLOCKS * chain.block_time:
        raise ConfigError(
            f"this machine's clock is {skew:+.0f} s off block {block.number}'s time: set it (ntp); if the chain has "
            "stalled, wait or use another --subtensor.network"
        )


async def twice(question: Callable[[], Awaitable[T]]) -> T:
    """Ask the chain, and once more if it does not answer: a short interruption is not reported as a problem."""
    try:
        return await question()
    except ChainUnavailable as error:
        logger.info("the chain did not answer, asking again: %s", error)
        await asyncio.sleep(max(HICCUP_SECONDS, error.retry_after))
        return await question()
