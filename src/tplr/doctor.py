"""``tplr doctor``: tries every configured bucket and key for real, and says what an operator has to change."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tplr.config import (
    KINDS,
    Kind,
    bucket_for,
    endpoint_override,
    is_configured,
    load_bucket_secrets,
    process_environment,
)
from tplr.errors import ConfigError, StoreError
from tplr.storage import S3Connections, endpoint_url
from tplr.storage.probe import Finding, ProbeResult, probe_access, probe_speed
from tplr.storage.probe_damage import probe_damage

_COLOURS = {ProbeResult.OK: "green", ProbeResult.WARNING: "yellow", ProbeResult.PROBLEM: "red"}
# Their read keys are what peers find on chain.
_PUBLISHED: tuple[Kind, ...] = ("gradients",)


@dataclass(frozen=True)
class Report:
    """What was found out about one bucket, or about settings that name none."""

    title: str
    findings: tuple[Finding, ...]


def main(kinds: Sequence[str]) -> int:
    """Print a table for each bucket of ``kinds``; without any, of gradients and of all that have settings.

    Returns:
        0 if all is well, 1 if something that was tried does not work, 2 if settings are missing or malformed.
    """
    console = Console()
    env = process_environment()
    chosen: list[Kind] = [kind for kind in KINDS if kind in (kinds or _configured(env))]
    if unknown := sorted(set(kinds) - set[str](KINDS)):
        console.print(f"no such kind of bucket: {escape(', '.join(unknown))}; expected {', '.join(KINDS)}")
        return 2
    try:
        with console.status("trying the buckets …"):
            reports, settings_are_whole = asyncio.run(examine(chosen, env))
    except ConfigError as error:
        console.print(escape(str(error)))
        return 2
    for report in reports:
        console.print(_table(report))
    if not settings_are_whole:
        return 2
    return int(any(finding.verdict is ProbeResult.PROBLEM for report in reports for finding in report.findings))


async def examine(kinds: Sequence[Kind], env: Mapping[str, str]) -> tuple[list[Report], bool]:
    """Try the buckets of ``kinds``, one after the other; and whether their settings in ``env`` are whole.

    Raises:
        ConfigError: the endpoint override is no address.
    """
    reports: list[Report] = []
    settings_are_whole = True
    secrets = load_bucket_secrets(env)
    async with S3Connections(endpoint_override(env)) as connections:
        for kind in kinds:
            try:
                record = secrets[kind]
            except ConfigError as error:
                settings_are_whole = False
                problems = (
                    Finding("settings", ProbeResult.PROBLEM, text, "see .env.example") for text in error.problems
                )
                reports.append(Report(f"{kind} bucket", tuple(problems)))
                continue
            for number, one in enumerate(record.get("multiple", [record])):
                variables = f"R2_{kind.upper()}" + (f"_BUCKET_LIST[{number}]" if "multiple" in record else "")
                reports.append(await _examine_bucket(connections, kind, one, variables, endpoint_override(env)))
    return reports, settings_are_whole


async def _examine_bucket(
    connections: S3Connections, kind: Kind, record: dict[str, Any], variables: str, override: str | None
) -> Report:
    bucket = bucket_for(kind, "read", {kind: record})
    readable, writable = connections.store(bucket), None
    if "write" in record["credentials"]:
        writable = connections.store(bucket_for(kind, "write", {kind: record}))
    findings = await probe_access(readable, writable, variables=variables, published=kind in _PUBLISHED)
    if not any(finding.verdict is ProbeResult.PROBLEM for finding in findings):
        if writable is not None:
            findings += await probe_damage(writable)
        try:
            findings += await probe_speed(readable, writable)
        except StoreError as error:
            findings.append(Finding("speed", ProbeResult.PROBLEM, str(error), "try again; it worked a moment before"))
    return Report(f"{kind} bucket {bucket.name} at {endpoint_url(bucket, override)}", tuple(findings))


def _configured(env: Mapping[str, str]) -> list[Kind]:
    """The kinds that any setting names, and gradients, which every node has."""
    return [kind for kind in KINDS if kind == "gradients" or is_configured(kind, env)]


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
