"""Writes the description of a run from its constants and its owner's environment, after testing its public keys."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tplr.config import Environment, Kind
from tplr.errors import ConfigError
from tplr.files import atomic_writer
from tplr.hparams import load_hparams
from tplr.join.description import PLAIN_SIGNS, RunDescription, hparams_digest
from tplr.storage import S3Connections
from tplr.storage.probe import ProbeResult, probe_access

SHARED: tuple[Kind, ...] = ("aggregator", "checkpoints")  # public buckets that a run may have
# Key of the description → the option that gives it, and the expected value in words.
OPTIONS = {
    "name": ("--name", "1 to 40 of a-z, 0-9, -, the first one not -"),
    "netuid": ("--netuid", "0 to 65535"),
    "network": ("--network", f"1 to 512 letters, digits or {PLAIN_SIGNS}"),
    "first_window": ("--first-window", "a number from 0 on"),
    "hparams": ("--hparams", "a file whose name has only letters, digits, ., _, -"),
    "links": ("--link", "NAME=https://…, with a name of a-z, 0-9, -"),
}

T = TypeVar("T")


def describe(
    *,
    name: str,
    netuid: int,
    network: str,
    hparams: Path,
    first_window: int | None,
    links: Mapping[str, str],
    out: Path,
    replace: bool,
) -> RunDescription:
    """Describe a run whose public buckets are those of this process's environment, for ``write``.

    Every read key is tested, because it becomes public: it must be able to read, but not to write.

    Raises:
        ConfigError: lists all problems of the arguments, the hparams and the variables; or, if there are none, those
            of the keys.
    """
    environment = Environment.read()
    problems: list[str] = []

    def take(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except ConfigError as error:
            problems.extend(one for one in error.problems if one not in problems)
            return None

    take(lambda: _check_out(out, hparams, replace=replace))
    digest = take(lambda: hparams_digest(hparams)) if take(lambda: load_hparams(hparams)) else None
    kinds: list[Kind] = ["dataset", *(kind for kind in SHARED if environment.configured(kind))]
    buckets = {kind: take(partial(_public, environment, kind)) for kind in kinds}
    if (dataset := take(environment.dataset)) and (public := buckets["dataset"]):
        public["subfolder"] = dataset.subfolder
    values = {
        "format": 1,
        "name": name,
        "netuid": netuid,
        "network": network,
        "first_window": first_window,
        "s3_endpoint": take(lambda: environment.endpoint),
        "hparams": {"file": hparams.name, "sha256": digest or "0" * 64},
        **buckets,
        "links": dict(links),
    }
    found = None
    try:
        found = RunDescription.model_validate(values)
    except ValidationError as error:
        unknown = [kind for kind, public in buckets.items() if public is None]  # reported above
        problems += [_problem(one) for one in error.errors() if one["loc"][0] not in unknown]
    if found is None or problems:
        raise ConfigError(problems)
    asyncio.run(_try_keys(Environment(found.variables()), kinds))
    return found


def write(description: RunDescription, path: Path, *, replace: bool) -> None:
    """Write ``description`` to ``path``.

    Raises:
        ConfigError: the file exists and ``replace`` is false.
        StateError: the folder can't be written.
    """
    try:
        with atomic_writer(path, create_only=not replace) as file:
            file.write(description.to_toml().encode())
    except FileExistsError:
        raise _exists(path) from None


def _check_out(path: Path, hparams: Path, *, replace: bool) -> None:
    """Raise ConfigError if ``path`` is not in the folder of ``hparams``, or exists and ``replace`` is false."""
    if path.absolute().parent != hparams.absolute().parent:
        raise ConfigError(f"--out {path}: expected a file in the folder of {hparams}: both are published together")
    if path.exists() and not replace:
        raise _exists(path)


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists: give --replace, or another --out")


def _problem(error: Mapping[str, Any]) -> str:
    """Return the option or the variable of a wrong value, and what is expected; a value only if it is no secret."""
    first, *rest = error["loc"]
    if first in OPTIONS:
        option, expected = OPTIONS[first]
        given = "=".join([*(str(one) for one in rest if one != "[key]"), str(error["input"])])
        return f"{option} {given}: expected {expected}"
    if rest:
        return f"R2_{first.upper()}_{str(rest[0]).upper()}: expected 1 to 512 letters, digits or {PLAIN_SIGNS}"
    return f"{first}: {error['msg']}"


def _public(environment: Environment, kind: Kind) -> dict[str, Any]:
    """Return the values of ``PublicBucket`` of a bucket of ``environment``; of a dataset's replicas, the first one's.

    Without the write keys.
    """
    record = environment.record(kind)
    record = record.get("multiple", [record])[0]
    keys = record["credentials"]["read"]
    return {
        "account_id": record.get("account_id"),
        "bucket_name": record["name"],
        "jurisdiction": record.get("jurisdiction"),
        "read_access_key_id": str(keys["access_key_id"]),
        "read_secret_access_key": str(keys["secret_access_key"]),
    }


async def _try_keys(environment: Environment, kinds: list[Kind]) -> None:
    async with S3Connections.of(environment) as connections:
        problems = []
        for kind in kinds:
            store = connections.store(environment.bucket(kind, "read"))
            findings = await probe_access(store, None, variables=f"R2_{kind.upper()}", published=True)
            failed = [one for one in findings if one.verdict is ProbeResult.PROBLEM]
            problems += [f"{kind} bucket: {one.found}; {one.remedy}" for one in failed]
    if problems:
        raise ConfigError(problems)
