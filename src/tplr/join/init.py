"""Writes the description of a run from its constants and its owner's environment, after testing its public keys."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tplr.config import Environment, Kind
from tplr.errors import ConfigError
from tplr.files import atomic_writer
from tplr.hparams import load_hparams
from tplr.join.description import RunDescription, hparams_digest
from tplr.storage import S3Connections
from tplr.storage.probe import ProbeResult, probe_access


def describe(
    *,
    name: str,
    netuid: int,
    network: str,
    hparams: Path,
    first_window: int | None,
    links: Mapping[str, str],
) -> RunDescription:
    """Describe a run whose public buckets are those of this process's environment.

    Every read key is tested, because it becomes public: it must be able to read, but not to write.

    Raises:
        ConfigError: lists all problems of the arguments, the hparams, the variables and the keys.
    """
    environment = Environment.read()
    load_hparams(hparams)
    shared: tuple[Kind, ...] = ("aggregator", "checkpoints")
    buckets: dict[Kind, dict[str, Any]] = {}
    for kind in shared:
        if environment.configured(kind):
            buckets[kind] = _public(environment, kind)
    dataset = environment.dataset()
    try:
        found = RunDescription.model_validate(
            {
                "format": 1,
                "name": name,
                "netuid": netuid,
                "network": network,
                "first_window": first_window,
                "s3_endpoint": environment.endpoint,
                "hparams": {"file": hparams.name, "sha256": hparams_digest(hparams)},
                "dataset": {**_public(environment, "dataset"), "subfolder": dataset.subfolder},
                **buckets,
                "links": dict(links),
            }
        )
    except ValidationError as error:
        problems = [f"{_given(one)}: {one['msg']}" for one in error.errors()]
        raise ConfigError(problems) from None
    asyncio.run(_try_keys(Environment(found.variables()), ["dataset", *buckets]))
    return found


def write(description: RunDescription, path: Path, *, hparams: Path, replace: bool) -> None:
    """Write ``description`` to ``path``, which must be in the folder of ``hparams``.

    Raises:
        ConfigError: it is in another folder, or the file exists and ``replace`` is false.
        StateError: the folder can't be written.
    """
    if path.absolute().parent != hparams.absolute().parent:
        raise ConfigError(f"--out {path}: expected a file in the folder of {hparams}: both are published together")
    try:
        with atomic_writer(path, create_only=not replace) as file:
            file.write(description.to_toml().encode())
    except FileExistsError:
        raise ConfigError(f"{path} exists: give --replace, or another --out") from None


def _given(problem: Mapping[str, Any]) -> str:
    """Return the name of a wrong value and, unless it is a key, the value."""
    name = ".".join(map(str, problem["loc"]))
    return name if name.endswith(("access_key", "access_key_id")) else f"{name} {problem['input']!r}"


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
