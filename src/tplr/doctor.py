"""``tplr doctor``: tests every configured bucket and key against its server, and reports what to change."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from tplr.chain.commitment import encode_commitment
from tplr.config import KINDS, Environment, Kind, bucket_of
from tplr.console import Console
from tplr.errors import ConfigError, StoreError
from tplr.schemas import Bucket
from tplr.storage import S3Connections, endpoint_url
from tplr.storage.probe import Finding, ProbeResult, probe_access, probe_speed
from tplr.storage.probe_damage import probe_damage

_COLOURS = {ProbeResult.OK: "green", ProbeResult.WARNING: "yellow", ProbeResult.PROBLEM: "red"}
# Buckets whose read key is published on chain.
_PUBLISHED: tuple[Kind, ...] = ("gradients",)


@dataclass(frozen=True)
class Report:
    """The findings about one bucket; ``configured``: whether its settings are complete and well-formed."""

    title: str
    findings: Sequence[Finding]
    configured: bool = True


# An examination of something other than a bucket: a node's start-up checks.
More = Callable[[Environment], Awaitable["Report"]]


def main(
    kinds: Sequence[str], more: More | None = None, environment: Environment | None = None, *, own: Kind = "gradients"
) -> int:
    """Print a table for each bucket of ``kinds``; if empty, for ``own`` and every other configured kind.

    Args:
        own: the kind of bucket that the node writes to and requires.
        more: returns one more table; its problems count as failed tests.
        environment: None for that of this process.

    Returns:
        0 if everything works, 1 if a test of a bucket failed, 2 if settings are missing or malformed.
    """
    console = Console()
    if unknown := sorted(set(kinds) - set[str](KINDS)):
        console.print(f"unknown kind of bucket: {escape(', '.join(unknown))}; expected {', '.join(KINDS)}")
        return 2
    try:
        environment = environment or Environment.read()
        chosen: list[Kind] = [kind for kind in KINDS if kind in (kinds or configured_kinds(environment, own))]
        with console.status("testing the buckets …"):
            reports = asyncio.run(_examine_all(chosen, environment, more))
    except ConfigError as error:
        console.print(escape(str(error)))
        return 2
    for report in reports:
        console.print(_table(report))
    if not all(report.configured for report in reports):
        return 2
    return int(any(finding.verdict is ProbeResult.PROBLEM for report in reports for finding in report.findings))


async def _examine_all(kinds: Sequence[Kind], environment: Environment, more: More | None) -> list[Report]:
    try:
        reports = await examine(kinds, environment)
    except ConfigError as error:  # in settings shared by all buckets: it must not hide other problems
        reports = [Report("buckets", _settings(error), configured=False)]
    if environment.exposed:
        found, remedy = "other users of this machine can read its keys", f"chmod 600 {environment.exposed}"
        reports.append(Report("file .env", [Finding("permissions", ProbeResult.WARNING, found, remedy)]))
    if more is None:
        return reports
    last, said = await more(environment), {finding.found for report in reports for finding in report.findings}
    return [*reports, replace(last, findings=[one for one in last.findings if one.found not in said])]


async def examine(kinds: Sequence[Kind], environment: Environment) -> list[Report]:
    """Test the buckets of ``kinds`` sequentially; return a report for each bucket.

    Raises:
        ConfigError: the endpoint is malformed.
    """
    reports: list[Report] = []
    async with S3Connections.of(environment) as connections:
        for kind in kinds:
            try:
                record = environment.record(kind)
            except ConfigError as error:
                reports.append(Report(f"{kind} bucket", _settings(error), configured=False))
                continue
            for number, replica in enumerate(record.get("multiple", [record])):
                variables = f"R2_{kind.upper()}" + (f"_BUCKET_LIST[{number}]" if "multiple" in record else "")
                reports.append(await _examine_bucket(connections, kind, replica, variables))
    return reports


async def _examine_bucket(connections: S3Connections, kind: Kind, record: dict[str, Any], variables: str) -> Report:
    bucket = bucket_of(kind, "read", record)
    readable, writable = connections.store(bucket), None
    if "write" in record["credentials"]:
        writable = connections.store(bucket_of(kind, "write", record))
    findings = await probe_access(readable, writable, variables=variables, published=kind in _PUBLISHED)
    if kind in _PUBLISHED:
        findings.append(_fits_the_chain(bucket, variables))
    if not any(finding.verdict is ProbeResult.PROBLEM for finding in findings):
        if writable is not None:
            findings += await probe_damage(writable)
        try:
            findings += await probe_speed(readable, writable)
        except StoreError as error:
            findings.append(Finding("speed", ProbeResult.PROBLEM, str(error), "try again: the bucket answered before"))
    return Report(f"{kind} bucket {bucket.name} at {endpoint_url(bucket, connections.endpoint)}", findings)


def _fits_the_chain(bucket: Bucket, variables: str) -> Finding:
    """Check whether name and read key can be published on chain, so that other nodes find the bucket."""
    try:
        encode_commitment(bucket)
    except ValueError as error:
        return Finding(
            "commitment", ProbeResult.PROBLEM, str(error), f"use a bucket and keys like R2's for {variables}"
        )
    return Finding("commitment", ProbeResult.OK, "fits the chain's 128 characters")


def _settings(error: ConfigError) -> list[Finding]:
    return [Finding("settings", ProbeResult.PROBLEM, text, "see .env.example") for text in error.problems]


def configured_kinds(environment: Environment, own: Kind) -> list[Kind]:
    """Return ``own``, and every other kind of bucket that is configured."""
    return [kind for kind in KINDS if kind == own or environment.configured(kind)]


def _table(report: Report) -> Table:
    table = Table(title=escape(report.title), title_justify="left", show_lines=True)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in report.findings:
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, verdict, escape(finding.found), escape(finding.remedy))
    return table
