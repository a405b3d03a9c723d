"""``run.toml``: the facts of a run that a newcomer needs, published by its owner (``docs/formats.md``)."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tplr.config import DATASET_SUBFOLDER, Kind, checked_endpoint
from tplr.errors import ConfigError
from tplr.untrusted import printable

MAX_BYTES = 2**16  # maximum size of the description
MAX_HPARAMS_BYTES = 2**20
# The time of ``tomllib`` grows with the square of the number of parts of a key: 64 KiB took minutes.
MAX_DOTS = 64  # in a line of the description

# Printable ASCII without quotes, so that a value is harmless on a terminal, in a file of variables and in a unit.
PLAIN_SIGNS = "._~:/?#@!&()*+,;=-"
_Plain = Annotated[str, Field(pattern=rf"^[A-Za-z0-9{PLAIN_SIGNS}]{{1,512}}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
_Url = Annotated[str, Field(pattern=r"^https://[A-Za-z0-9._~:/?#@!&()*+,;=%-]{1,500}$")]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class HparamsFile(_Table):
    """The run's constants: ``file`` is in the folder of ``run.toml``, ``sha256`` is the hash of its bytes."""

    file: _FileName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PublicBucket(_Table):
    """A public bucket with its read key; names and patterns are those of ``config.py``."""

    account_id: _Plain | None = None
    bucket_name: _Plain
    jurisdiction: Literal["default", "eu", "fedramp"] | None = None
    read_access_key_id: _Plain
    read_secret_access_key: _Plain

    def variables(self, kind: Kind) -> dict[str, str]:
        """Return the environment variables of this bucket."""
        given = self.model_dump(include=set(PublicBucket.model_fields), exclude_none=True)
        return {f"R2_{kind.upper()}_{name.upper()}": value for name, value in given.items()}


class DatasetBucket(PublicBucket):
    """The dataset; ``subfolder`` is the prefix of its keys."""

    subfolder: _Plain = DATASET_SUBFOLDER


class RunDescription(_Table):
    """The content of ``run.toml``.

    Attributes:
        format: version of the file format.
        network: the chain's network: a name, or the URL of a node.
        first_window: announced first window; None: as soon as ``minimum_peers`` miners have a bucket on chain.
        s3_endpoint: server of all buckets of the run; None: R2.
        aggregator, checkpoints: None if the run has no such bucket.
        links: by name, such as ``website`` or ``chat``.
    """

    format: Literal[1]
    name: _Name
    netuid: int = Field(ge=0, le=65535)
    network: _Plain
    first_window: int | None = Field(default=None, ge=0, lt=2**53)
    s3_endpoint: _Plain | None = None
    hparams: HparamsFile
    dataset: DatasetBucket
    aggregator: PublicBucket | None = None
    checkpoints: PublicBucket | None = None
    links: dict[_Name, _Url] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _check_endpoint(self) -> "RunDescription":
        try:
            if self.s3_endpoint is not None:
                checked_endpoint(self.s3_endpoint, "s3_endpoint")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def variables(self) -> dict[str, str]:
        """Return the environment variables that are equal for every node of the run."""
        found = self.dataset.variables("dataset") | {"TPLR_DATASET_SUBFOLDER": self.dataset.subfolder}
        if self.aggregator:
            found |= self.aggregator.variables("aggregator")
        if self.checkpoints:
            found |= self.checkpoints.variables("checkpoints")
        return found | ({"TPLR_S3_ENDPOINT": self.s3_endpoint} if self.s3_endpoint else {})

    def to_toml(self) -> str:
        """Return this description as the text of a file."""
        lines = ["# A run of templar. To take part: tplr join run.toml (docs/run.md explains every key).", ""]
        values = self.model_dump(exclude_none=True)
        for tables in (False, True):  # keys of the file itself come before its first table
            for key, value in values.items():
                if isinstance(value, dict) != tables or value == {}:
                    continue
                lines += ["", f"[{key}]", *map(_line, value.items())] if tables else [_line((key, value))]
        return "\n".join(lines) + "\n"


def _line(item: tuple[str, Any]) -> str:
    return f"{item[0]} = {json.dumps(item[1])}"  # with the allowed characters, JSON strings are TOML strings


def load_description(path: Path) -> RunDescription:
    """Read and check a description, and check that the hparams file beside it is the one that it names.

    Raises:
        ConfigError: the file is missing, too large or not TOML; a line has too many dots; keys are unknown, missing or
            wrong (lists all of them); or the hparams file is missing or a different one.
    """
    body = _read(path, MAX_BYTES)
    for number, line in enumerate(body.split(b"\n"), 1):
        if line.count(b".") > MAX_DOTS:
            raise ConfigError(f"{path}: line {number} has more than {MAX_DOTS} dots: no key or value needs them")
    try:
        found = RunDescription.model_validate(tomllib.loads(body.decode()))
    except ValidationError as error:
        # The value is not shown, because it is untrusted; keys and messages may not be printable.
        told = [f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors()]
        raise ConfigError([f"{path}: {printable(one)}" for one in told]) from None
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}") from None
    digest = hparams_digest(path.parent / found.hparams.file)
    if digest != found.hparams.sha256:
        raise ConfigError(
            f"{path.parent / found.hparams.file}: SHA-256 is {digest}, expected {found.hparams.sha256} from {path}: "
            "download both files of the run again, from one source"
        )
    return found


def hparams_digest(path: Path) -> str:
    """Return the SHA-256 of a hparams file's bytes, as ``sha256sum`` does. Raises ConfigError if it can't be read."""
    return hashlib.sha256(_read(path, MAX_HPARAMS_BYTES)).hexdigest()


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(limit + 1)
    except OSError as error:
        denied = isinstance(error, PermissionError)
        remedy = "let the account of the node read it" if denied else "give the path of a run.toml"
        raise ConfigError(f"{path}: {error.strerror}: {remedy}") from None
    if len(body) > limit:
        raise ConfigError(f"{path}: expected at most {limit} bytes")
    return body
