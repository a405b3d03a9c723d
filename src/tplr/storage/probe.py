"""Probes a bucket and its two keys: access, latency, throughput and clock, with a remedy for each problem."""

import asyncio
import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from enum import StrEnum

from tplr.errors import AccessDenied, ObjectNotFound, StoreError, StoreUnavailable
from tplr.keys import probe_key
from tplr.storage.base import ObjectStore
from tplr.storage.retry import with_retry

HEADS = 5
# Time for retries of each request of ``probe_access``, because a transient 503 is no problem of the settings.
RETRY_SECONDS = 4.0
SPEED_BYTES = 8 * 2**20
# Stores refuse signatures whose time is off by 15 minutes; the chain allows five.
SKEW_WARNING_SECONDS, SKEW_PROBLEM_SECONDS = 5.0, 300.0
SLOW_BYTES_PER_SECOND = 2**20


class ProbeResult(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One check: its result and the remedy.

    Attributes:
        outside: the problem is a server or a network that does not answer, so it may end without a change here.
    """

    check: str
    verdict: ProbeResult
    found: str
    remedy: str = ""
    outside: bool = False


async def probe_access(
    readable: ObjectStore, writable: ObjectStore | None, *, variables: str, published: bool
) -> list[Finding]:
    """Test each key's permissions. Removes the objects that it writes, unless it is cancelled.

    Args:
        writable: the same bucket with its write key, if any.
        variables: prefix of the names of the bucket's settings, such as ``R2_GRADIENTS``, for the remedies.
        published: the read key is published on chain, so a read key that can write is a problem, not a warning.
    """
    key = probe_key()
    findings: list[Finding] = []
    tried: list[tuple[ObjectStore, str]] = []
    if writable is not None:
        findings.append(await _probe_write(writable, key, variables))
        tried.append((writable, key))
    written = bool(findings) and findings[0].verdict is ProbeResult.OK
    findings.append(await _probe_read(readable, key if written else None, variables))
    if findings[-1].verdict is ProbeResult.OK:
        by_read_key = f"{key}-by-read-key"
        findings.append(await _probe_read_only(readable, by_read_key, variables, published=published))
        tried.append((readable, by_read_key))
    for store, name in tried:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                await store.delete(name)
    return findings


async def probe_speed(readable: ObjectStore, writable: ObjectStore | None) -> list[Finding]:
    """Measure latency, throughput and, with ``writable``, the clock offset between this machine and the store.

    Raises:
        StoreError: a request failed that succeeded in ``probe_access``.
    """
    findings = [await _probe_latency(readable)]
    key = probe_key()
    if writable is not None:
        body = os.urandom(SPEED_BYTES)
        before, began = time.time(), time.perf_counter()
        try:
            info = await writable.put(key, body)
            seconds = time.perf_counter() - began
            findings.append(_judge_clock(clock_offset(before, info.last_modified, time.time())))
            findings.append(_judge_speed("upload", len(body), seconds))
            findings.append(await _time_download(readable, key, len(body)))
        finally:
            await writable.delete(key)
    elif largest := max(await readable.list(limit=100), key=lambda info: info.size, default=None):
        findings.append(await _time_download(readable, largest.key, min(largest.size, SPEED_BYTES)))
    return findings


def clock_offset(before: float, stamp: float, after: float) -> float:
    """Return the smallest possible offset of this machine's clock from a store's: ahead (+) or behind (-), in seconds.

    It is 0 if the clocks may agree.

    Args:
        before, after: unix seconds of this machine, before the request and after the answer.
        stamp: the store's clock in between, truncated to whole seconds.
    """
    return max(before - (stamp + 1), 0.0) or min(after - stamp, 0.0)


async def _probe_write(writable: ObjectStore, key: str, variables: str) -> Finding:
    try:
        await with_retry(lambda: writable.put(key, b"templar"), deadline_seconds=RETRY_SECONDS)
    except StoreError as error:
        return _failed("write key", f"the write key can't write: {error}", error, variables, "WRITE")
    return Finding("write key", ProbeResult.OK, "can write")


async def _probe_read(readable: ObjectStore, key: str | None, variables: str) -> Finding:
    """Read the object ``key``, or list the bucket if it is None."""
    check = "read key"
    try:
        if key is None:
            await with_retry(lambda: readable.list(limit=1), deadline_seconds=RETRY_SECONDS)
        else:
            await with_retry(lambda: readable.get(key, max_bytes=1024), deadline_seconds=RETRY_SECONDS)
    except ObjectNotFound as error:
        lost = "the object of the write key is not there" if key else f"the read key can't read: {error}"
        remedy = "check that both keys belong to this bucket"
        return Finding(check, ProbeResult.PROBLEM, f"{readable.name}: {lost}", remedy)
    except StoreError as error:
        return _failed(check, f"the read key can't read: {error}", error, variables, "READ")
    return Finding(check, ProbeResult.OK, "can read")


def _failed(check: str, found: str, error: StoreError, variables: str, right: str) -> Finding:
    """Return the finding for a failed request. A server that does not answer is no evidence about the keys."""
    if isinstance(error, StoreUnavailable):
        remedy = f"the server or the network is down: try again; check the network and {variables}_ACCOUNT_ID"
        return Finding(check, ProbeResult.PROBLEM, found, remedy, outside=True)
    if isinstance(error, ObjectNotFound):
        return Finding(check, ProbeResult.PROBLEM, found, f"check {variables}_BUCKET_NAME and {variables}_ACCOUNT_ID")
    remedy = f"check {variables}_{right}_*: the secret may be wrong, or the key may belong to another bucket"
    return Finding(check, ProbeResult.PROBLEM, found, remedy)


async def _probe_read_only(readable: ObjectStore, key: str, variables: str, *, published: bool) -> Finding:
    check = "read key is read-only"
    try:
        await with_retry(lambda: readable.put(key, b"templar"), deadline_seconds=RETRY_SECONDS)
        found = "the read key can also write"
    except AccessDenied:
        return Finding(check, ProbeResult.OK, "can't write")
    except StoreError as error:
        # The write failed for a reason other than a missing permission, so refuse the key, to be safe.
        found = f"the read key may be able to write: its test ended with {error}"
    shown = ", and the chain would publish it" if published else ""
    return Finding(
        check,
        ProbeResult.PROBLEM if published else ProbeResult.WARNING,
        found + shown,
        f"make an 'Object Read only' token and put it into {variables}_READ_*",
    )


async def _probe_latency(store: ObjectStore) -> Finding:
    seconds = []
    for _ in range(HEADS):
        began = time.perf_counter()
        with contextlib.suppress(ObjectNotFound):
            await store.head("probe-of-latency")
        seconds.append(time.perf_counter() - began)
    # The first request opened the connection.
    return Finding("latency", ProbeResult.OK, f"{1000 * statistics.median(seconds[1:]):.0f} ms a request")


async def _time_download(store: ObjectStore, key: str, size: int) -> Finding:
    began = time.perf_counter()
    await store.get(key, max_bytes=size, byte_range=(0, size) if size else None)
    return _judge_speed("download", size, time.perf_counter() - began)


def _judge_speed(direction: str, size: int, seconds: float) -> Finding:
    speed = size / seconds
    found = f"{size / 2**20:.1f} MiB at {speed / 2**20:.1f} MiB/s"
    # A few bytes measure latency only.
    if speed >= SLOW_BYTES_PER_SECOND or size < SPEED_BYTES:
        return Finding(direction, ProbeResult.OK, found)
    return Finding(direction, ProbeResult.WARNING, found, "too slow to keep up: check this machine's network")


def _judge_clock(offset: float) -> Finding:
    if abs(offset) < SKEW_WARNING_SECONDS:
        return Finding("clock", ProbeResult.OK, "agrees with the store's")
    verdict = ProbeResult.WARNING if abs(offset) < SKEW_PROBLEM_SECONDS else ProbeResult.PROBLEM
    return Finding("clock", verdict, f"this machine's clock is {offset:+.0f} s off the store's", "set it (ntp)")
