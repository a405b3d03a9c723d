"""Configuration from the environment: buckets, credentials, endpoint, proxy, ranks. Read on request, never at import.

Variables of each kind of bucket (``GRADIENTS``, ``AGGREGATOR``, ``DATASET``, ``CHECKPOINTS``, ``PAGE``)::

    R2_KIND_ACCOUNT_ID              R2_KIND_BUCKET_NAME             R2_KIND_JURISDICTION (default, eu or fedramp)
    R2_KIND_READ_ACCESS_KEY_ID      R2_KIND_READ_SECRET_ACCESS_KEY
    R2_KIND_WRITE_ACCESS_KEY_ID     R2_KIND_WRITE_SECRET_ACCESS_KEY

Only ``GRADIENTS`` and ``PAGE`` must have write credentials. Without any ``R2_CHECKPOINTS_`` variable, checkpoints are
kept in the gradients bucket. An empty variable counts as not set. ``R2_DATASET_BUCKET_LIST`` replaces the other
``R2_DATASET_`` variables: a JSON list of replicas, each in the form of ``BUCKET_SECRETS`` (``bucket_name`` is accepted
for ``name``). With ``TPLR_S3_ENDPOINT``, all buckets are on that server, account ids are not needed, and names and keys
may have the lengths of any S3 server. A ``.env`` file in the working directory or in a folder above it provides the
variables that the process does not set.
"""

import difflib
import json
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from dotenv import dotenv_values, find_dotenv

from tplr.errors import ConfigError
from tplr.home_paths import expanded
from tplr.resources import local_processes
from tplr.schemas import ACCESS_KEY_ID, ACCOUNT_ID, BUCKET_NAME, SECRET_ACCESS_KEY, Bucket

Kind = Literal["gradients", "aggregator", "dataset", "checkpoints", "page"]
Access = Literal["read", "write"]
KINDS: tuple[Kind, ...] = ("gradients", "aggregator", "dataset", "checkpoints", "page")
MUST_WRITE: tuple[Kind, ...] = ("gradients", "page")

KILL_AT = "TPLR_LOCALNET_KILL_AT"
LAUNCHED = "tplr-"  # how the run id of ranks begins that ``tplr ROLE --ranks`` started
# All variables with this project's prefix that are read.
TPLR_NAMES = (
    "TPLR_CACHE_FOLDER",
    "TPLR_CHECKPOINT_PARTS",
    "TPLR_DATASET_SUBFOLDER",
    "TPLR_DATA_THREADS",
    "TPLR_GATHER_PEERS",
    "TPLR_S3_ENDPOINT",
    "TPLR_S3_REGION",
    "TPLR_TENSOR_THREADS",
    "TPLR_TRANSFERS",
    KILL_AT,
)

DATASET_SUBFOLDER = "HuggingFaceFW_fineweb-edu-score-2"

_HEX32, _HEX64 = "32 characters of 0-9a-f", "64 characters of 0-9a-f"


class _Part(NamedTuple):
    """A value of a bucket: the suffix of its variable's name, its pattern, and the pattern in words."""

    suffix: str
    pattern: re.Pattern[str]
    expected: str


# By the value's path in a bucket's record.
_Parts = dict[tuple[str, ...], _Part]
_PARTS: _Parts = {
    ("account_id",): _Part("ACCOUNT_ID", ACCOUNT_ID, _HEX32),
    ("name",): _Part("BUCKET_NAME", BUCKET_NAME, "3 to 63 of a-z, 0-9, -"),
    ("jurisdiction",): _Part("JURISDICTION", re.compile("default|eu|fedramp"), "default, eu or fedramp"),
    ("credentials", "read", "access_key_id"): _Part("READ_ACCESS_KEY_ID", ACCESS_KEY_ID, _HEX32),
    ("credentials", "read", "secret_access_key"): _Part("READ_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY, _HEX64),
    ("credentials", "write", "access_key_id"): _Part("WRITE_ACCESS_KEY_ID", ACCESS_KEY_ID, _HEX32),
    ("credentials", "write", "secret_access_key"): _Part("WRITE_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY, _HEX64),
}
# The same with ``TPLR_S3_ENDPOINT``: keys of MinIO, AWS and others have different lengths and alphabets.
_S3_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_S3_KEY, _S3_KEY_TEXT = re.compile(r"[!-+.0-~-]{1,256}"), "1 to 256 printable ASCII characters, none of them / or ,"
_S3_SECRET, _S3_SECRET_TEXT = re.compile(r"[!-~]{1,256}"), "1 to 256 printable ASCII characters"
_S3_PARTS: _Parts = {
    ("account_id",): _Part("ACCOUNT_ID", _S3_KEY, _S3_KEY_TEXT),
    ("name",): _Part("BUCKET_NAME", _S3_NAME, "3 to 63 of a-z, 0-9, -, ."),
    ("jurisdiction",): _PARTS["jurisdiction",],
    ("credentials", "read", "access_key_id"): _Part("READ_ACCESS_KEY_ID", _S3_KEY, _S3_KEY_TEXT),
    ("credentials", "read", "secret_access_key"): _Part("READ_SECRET_ACCESS_KEY", _S3_SECRET, _S3_SECRET_TEXT),
    ("credentials", "write", "access_key_id"): _Part("WRITE_ACCESS_KEY_ID", _S3_KEY, _S3_KEY_TEXT),
    ("credentials", "write", "secret_access_key"): _Part("WRITE_SECRET_ACCESS_KEY", _S3_SECRET, _S3_SECRET_TEXT),
}


class Secret(str):
    """Half of a credential: a string with a masked ``repr``, so that printing a record does not reveal it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class BucketSecrets(Mapping[str, dict[str, Any]]):
    """Records of buckets by kind, as a mapping.

    A record is ``{"account_id", "name", "credentials": {"read": {"access_key_id", "secret_access_key"},
    "write": {...}}}``, or ``{"multiple": [...]}`` of such records for a dataset with replicas.

    A kind is checked only when it is accessed: a node that trains on local text needs no dataset bucket.

    Raises:
        ConfigError: variables of that kind are missing or malformed; lists all of them, without their values.
    """

    def __init__(self, environment: "Callable[[], Environment]") -> None:
        self._environment = environment

    def __getitem__(self, kind: str) -> dict[str, Any]:
        if kind not in KINDS:
            raise KeyError(kind)
        return self._environment().record(cast(Kind, kind))

    def __contains__(self, kind: object) -> bool:
        return kind in KINDS

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(KINDS)})"


@dataclass(frozen=True, kw_only=True)
class S3Bucket(Bucket):
    """A bucket of any S3-compatible service.

    Its endpoint is configured and never built from ``account_id``, so its fields may differ in form from those of R2.
    Requests without an access key are not signed.
    """

    account_id: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not _S3_NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is not a valid bucket name")


@dataclass(frozen=True)
class BucketLocation:
    """A bucket with its credential, its endpoint (None for R2's) and the region for which requests are signed.

    ``renew`` returns the bucket with a credential that is valid now, and may block; None if it does not expire.
    """

    bucket: Bucket
    endpoint: str | None
    region: str = "auto"
    renew: Callable[[], Bucket] | None = None


@dataclass(frozen=True)
class HttpsSettings:
    """Settings for connections with TLS.

    Attributes:
        ca_bundle: file with the trusted certificate authorities; "" for certifi's.
        proxy: URL of the proxy with its scheme, which may contain a password; "" for none.
        no_proxy: hosts that are reached without the proxy, separated by commas.
    """

    ca_bundle: str = ""
    proxy: str = field(default="", repr=False)
    no_proxy: str = ""


@dataclass(frozen=True)
class DatasetBuckets:
    """The location of the dataset: its replicas, one or more, and the prefix of its keys in each."""

    replicas: tuple[Bucket, ...]
    subfolder: str


@dataclass(frozen=True)
class NodeBuckets:
    """A node's gradients bucket with its write key, and two optional buckets with their write key, or else read key."""

    gradients: Bucket
    aggregator: Bucket | None
    checkpoints: Bucket | None


@dataclass(frozen=True)
class Environment:
    """The variables of this process, read once by ``Environment.read`` and passed on.

    Every method raises ConfigError if a variable that it needs is missing or malformed.

    Attributes:
        exposed: the ``.env`` file, if it holds a secret that other users of this machine can read.
    """

    variables: Mapping[str, str] = field(repr=False)
    exposed: Path | None = None

    @classmethod
    def read(cls) -> "Environment":
        """Read the variables of this process, and from the nearest ``.env`` file those that the process does not set.

        Raises:
            ConfigError: the ``.env`` file is not readable text.
        """
        path = find_dotenv(usecwd=True)
        try:
            dotenv = {name: value for name, value in dotenv_values(path).items() if value is not None}
            secret = any(value and name.endswith("_SECRET_ACCESS_KEY") for name, value in dotenv.items())
            exposed = Path(path) if secret and Path(path).stat().st_mode & 0o044 else None
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path}: expected a readable file in UTF-8, got {type(error).__name__}") from None
        return cls({**dotenv, **process_variables()}, exposed)

    def configured(self, kind: Kind) -> bool:
        """Return whether any ``R2_{KIND}_*`` has a value; empty ones, as in ``.env.example``, do not count."""
        return any(name.startswith(f"R2_{kind.upper()}_") and value for name, value in self.variables.items())

    def unknown_names(self) -> dict[str, str]:
        """Return names that begin with ``R2_`` or ``TPLR_`` but are not known, each with a similar known name or ""."""
        known = {*TPLR_NAMES, "R2_DATASET_BUCKET_LIST"}
        known |= {f"R2_{kind.upper()}_{part.suffix}" for kind in KINDS for part in _PARTS.values()}
        strange = sorted(name for name in self.variables if name.startswith(("R2_", "TPLR_")) and name not in known)
        return {name: next(iter(difflib.get_close_matches(name, sorted(known), n=1)), "") for name in strange}

    def needed(self, kind: Kind, *, write: bool) -> dict[str, str]:
        """Return the missing or malformed variables of a kind's bucket, each with a description of the expected value.

        Args:
            write: whether the write keys are also needed.
        """
        parts = self._parts
        optional = {("jurisdiction",)} | ({("account_id",)} if parts is _S3_PARTS else set())
        return {
            name: part.expected
            for place, part in parts.items()
            if place not in optional and (write or "write" not in place)
            if not part.pattern.fullmatch(self._get(name := f"R2_{kind.upper()}_{part.suffix}"))
        }

    def record(self, kind: Kind) -> dict[str, Any]:
        """Return the record of a kind of bucket, in the form of ``BucketSecrets``."""
        if kind == "checkpoints" and not self.configured("checkpoints"):
            kind = "gradients"
        problems: list[str] = []
        if kind == "dataset" and (replicas := self._get("R2_DATASET_BUCKET_LIST")):
            record: dict[str, Any] = {"multiple": _replicas(replicas, self._parts, problems)}
        else:
            names = {place: f"R2_{kind.upper()}_{part.suffix}" for place, part in _PARTS.items()}
            given = {place: self._get(name) for place, name in names.items()}
            record = _checked(given, names, self._parts, must_write=kind in MUST_WRITE, problems=problems)
        if problems:
            raise ConfigError([f"{kind} bucket: {problem}" for problem in problems])
        return record

    def buckets(self, kind: Kind, access: Access) -> tuple[Bucket, ...]:
        """Return the buckets of a kind with their credentials for ``access``; several if the dataset has replicas."""
        record = self.record(kind)
        return tuple(bucket_of(kind, access, one) for one in record.get("multiple", [record]))

    def bucket(self, kind: Kind, access: Access) -> Bucket:
        """Return the bucket of a kind, or the first of its replicas."""
        return self.buckets(kind, access)[0]

    def optional_bucket(self, kind: Kind) -> Bucket | None:
        """Return the bucket of a kind, with the write key if there is one; None if the kind is not configured."""
        if not self.configured(kind):
            return None
        return self.bucket(kind, "write" if "write" in self.record(kind)["credentials"] else "read")

    @property
    def endpoint(self) -> str | None:
        """``TPLR_S3_ENDPOINT``: an S3-compatible server that replaces R2 for all buckets; None if not set."""
        value = self._get("TPLR_S3_ENDPOINT")
        return checked_endpoint(value, "TPLR_S3_ENDPOINT") if value else None

    @property
    def https(self) -> HttpsSettings:
        """``AWS_CA_BUNDLE``, ``HTTPS_PROXY`` and ``NO_PROXY``. Lower case takes precedence for the last two."""
        ca_bundle, no_proxy = self._get("AWS_CA_BUNDLE"), self._get("no_proxy") or self._get("NO_PROXY")
        name = "https_proxy" if self._get("https_proxy") else "HTTPS_PROXY"
        proxy, problems = _proxy_url(self._get(name)), []
        if proxy is None:
            problems.append(
                f"{name}: expected http://[user:password@]host[:port], with escapes in the password (%40 for @)"
            )
        if ca_bundle:
            try:
                ssl.create_default_context(cafile=ca_bundle)
            except OSError as error:
                problems.append(
                    f"AWS_CA_BUNDLE is {ca_bundle!r}: expected a file of certificates in PEM form ({error.strerror})"
                )
        if proxy is None or problems:
            raise ConfigError(problems)
        return HttpsSettings(ca_bundle, proxy, no_proxy)

    @property
    def local_rank(self) -> str:
        """``LOCAL_RANK``: number of this process on its machine, set by ``torchrun``; "" without it."""
        return self._get("LOCAL_RANK")

    @property
    def world_size(self) -> int:
        """``WORLD_SIZE``: number of processes that ``torchrun`` started; 1 without it."""
        return self._torchrun_number("WORLD_SIZE", "1", "the number of processes", least=1)

    @property
    def local_world_size(self) -> int:
        """``LOCAL_WORLD_SIZE``: number of these processes on this machine; 1 without ``torchrun``."""
        return local_processes(self.variables)

    @property
    def rank(self) -> int:
        """``RANK``: number of this process among all of ``WORLD_SIZE``, set by ``torchrun``; 0 for a single process."""
        return self._torchrun_number("RANK", "0" if self.world_size == 1 else "", "the number of this process")

    @property
    def max_restarts(self) -> str:
        """``TORCHELASTIC_MAX_RESTARTS``: how often ``torchrun`` restarts failed ranks; "" without it."""
        return self._get("TORCHELASTIC_MAX_RESTARTS")

    @property
    def launched(self) -> bool:
        """Whether ``tplr ROLE --ranks``, which itself restarts failed ranks, started this one."""
        return self._get("TORCHELASTIC_RUN_ID").startswith(LAUNCHED)

    @property
    def restart_count(self) -> str:
        """``TORCHELASTIC_RESTART_COUNT``: how often ``torchrun`` has restarted the ranks; "0" without it."""
        return self._get("TORCHELASTIC_RESTART_COUNT") or "0"

    @property
    def kill_at(self) -> str:
        """``TPLR_LOCALNET_KILL_AT``: ``packed:3`` kills this node when it passes ``packed`` for the third time."""
        return self._get(KILL_AT)

    @property
    def region(self) -> str:
        """``TPLR_S3_REGION``: the region for which requests are signed; default: ``auto``, R2's."""
        value = self._get("TPLR_S3_REGION") or "auto"
        if not re.fullmatch(r"[a-z0-9-]{1,64}", value):
            raise ConfigError(f"TPLR_S3_REGION is {value!r}: expected a region's name, such as eu-west-1")
        return value

    @property
    def _parts(self) -> _Parts:
        return _S3_PARTS if self._get("TPLR_S3_ENDPOINT") else _PARTS

    def states_folder(self, netuid: int) -> Path:
        """Return the folder for ``local`` states and checkpoints of a subnet's nodes on this machine."""
        return self.cache_folder / "states" / str(netuid)

    @property
    def cache_folder(self) -> Path:
        """``TPLR_CACHE_FOLDER``: the folder for data that can be fetched again; default: ``~/.cache/tplr``."""
        return expanded(Path(self._get("TPLR_CACHE_FOLDER") or "~/.cache/tplr"), "TPLR_CACHE_FOLDER")

    def node_buckets(self) -> "NodeBuckets":
        """Return the buckets that a node opens; one ConfigError lists the problems of all of them."""
        kinds: tuple[Kind, ...] = ("gradients", "aggregator", "checkpoints")
        check_all(*(partial(self.record, kind) for kind in kinds if kind in MUST_WRITE or self.configured(kind)))
        return NodeBuckets(
            self.bucket("gradients", "write"), self.optional_bucket("aggregator"), self.optional_bucket("checkpoints")
        )

    def dataset(
        self, access: Access = "read", subfolder: str | None = None, *, default: str = DATASET_SUBFOLDER
    ) -> DatasetBuckets:
        """Return the dataset bucket; ``TPLR_DATASET_SUBFOLDER`` is the prefix of its keys.

        Args:
            subfolder: replaces the variable.
            default: used if the variable is not set.
        """
        prefix = subfolder or self._get("TPLR_DATASET_SUBFOLDER") or default
        problems = []
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", prefix, re.ASCII):
            problems = [
                f"TPLR_DATASET_SUBFOLDER is {prefix!r}: expected names of letters, digits, ., _, - with / between them"
            ]
        try:
            replicas = self.buckets("dataset", access)
        except ConfigError as error:
            raise ConfigError([*error.problems, *problems]) from None
        if problems:
            raise ConfigError(problems)
        return DatasetBuckets(replicas, prefix)

    def location(self, bucket: str) -> BucketLocation | None:
        """Return the configured bucket of that name with its read key; None if no ``R2_…`` variable names it."""
        for kind in KINDS:
            try:
                named = [one for one in self.buckets(kind, "read") if one.name == bucket]
            except ConfigError:
                continue
            if named:
                return BucketLocation(named[0], self.endpoint, self.region)
        return None

    def _torchrun_number(self, name: str, default: str, meaning: str, *, least: int = 0) -> int:
        value = self._get(name) or default
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(f"{name} is {value!r}: expected {meaning}, as torchrun sets it")
        return int(value)

    def _get(self, name: str) -> str:
        return self.variables.get(name, "")


def process_variables() -> dict[str, str]:
    """Return the variables of this process without those of a ``.env`` file, for processes that it starts."""
    return dict(os.environ)


def replace_process_variables(variables: Mapping[str, str]) -> None:
    """Replace all variables of this process, for a forked process that becomes another program."""
    os.environ.clear()
    os.environ.update(variables)


def hide_write_keys() -> None:
    """Remove ``R2_*_WRITE_*`` from this process's variables, so that child processes (W&B, hub) do not inherit them.

    Call it after they have been read. A ``.env`` file is protected by its permissions.
    """
    for name in [name for name in os.environ if name.startswith("R2_") and "_WRITE_" in name]:
        del os.environ[name]


def load_bucket_secrets(variables: Mapping[str, str] | None = None) -> BucketSecrets:
    """Return the secrets of all buckets in ``variables``; None for this process's, read at each access."""
    return BucketSecrets(Environment.read if variables is None else lambda: Environment(variables))


BUCKET_SECRETS = load_bucket_secrets()


def check_all(*checks: Callable[[], object]) -> None:
    """Call all of ``checks``; one ConfigError lists the problems of those that raise it."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def checked_endpoint(value: str, name: str) -> str:
    """Check ``http(s)://host[:port]`` and strip a final slash. Raises ConfigError, which shows only ``name``."""
    fits = re.fullmatch(r"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::([0-9]{1,5}))?/?", value)
    if not fits or not 0 < int(fits[2] or 1) < 2**16:
        raise ConfigError(f"{name}: expected http(s)://host[:port], without user, path or query")
    return value.rstrip("/")


def _proxy_url(value: str) -> str | None:
    """Return the URL of a proxy, whose scheme may be missing; "" for "", None if it is malformed."""
    if not value:
        return ""
    url = value if "://" in value else f"http://{value}"
    with suppress(ValueError):
        parts = urlsplit(url)
        host = re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname or "")
        only_host = url.rstrip("/") == f"{parts.scheme}://{parts.netloc}"
        if parts.scheme in ("http", "https") and host and only_host and parts.port != 0:
            return url
    return None


def bucket_of(kind: Kind, access: Access, record: Mapping[str, Any]) -> Bucket:
    """Return the bucket of a record (``BucketSecrets``). Raises ConfigError without credentials for ``access``."""
    if access not in record["credentials"]:
        raise ConfigError(
            f"{kind} bucket: set R2_{kind.upper()}_{access.upper()}_ACCESS_KEY_ID and _SECRET_ACCESS_KEY to {access} it"
        )
    fields = {
        "name": record["name"],
        "account_id": record.get("account_id", ""),
        "jurisdiction": record.get("jurisdiction", "default"),
        **record["credentials"][access],
    }
    try:
        return Bucket(**fields)
    except ValueError:
        return S3Bucket(**fields)  # of ``TPLR_S3_ENDPOINT``: without it, the record's values have R2's form


def _replicas(text: str, parts: _Parts, problems: list[str]) -> list[dict[str, Any]]:
    """Parse the records of ``R2_DATASET_BUCKET_LIST``; its problems are added to ``problems``."""
    name = "R2_DATASET_BUCKET_LIST"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        problems.append(f"{name} is not JSON")  # the parser's message would quote the value
        return []
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        problems.append(f"{name}: expected a list of one or more objects")
        return []
    return [
        _checked(
            {place: _at({"name": entry.get("bucket_name", "")} | entry, place) for place in _PARTS},
            {place: f"{name}[{i}].{'.'.join(place)}" for place in _PARTS},
            parts,
            must_write=False,
            problems=problems,
        )
        for i, entry in enumerate(entries)
    ]


def _at(entry: Any, place: tuple[str, ...]) -> object:
    for step in place:
        entry = entry.get(step, "") if isinstance(entry, dict) else ""
    return entry


def _checked(
    given: Mapping[tuple[str, ...], object],
    names: Mapping[tuple[str, ...], str],
    parts: _Parts,
    *,
    must_write: bool,
    problems: list[str],
) -> dict[str, Any]:
    """Build a bucket's record from the given values; problems are added to ``problems``, never with a value."""
    writes = must_write or any(value for place, value in given.items() if "write" in place)
    optional = [("jurisdiction",)] + [("account_id",)] * (parts is _S3_PARTS)
    record: dict[str, Any] = {}
    for place, part in parts.items():
        value = given[place]
        if not value:
            if place not in optional and (writes or "write" not in place):
                problems.append(f"{names[place]} is missing: expected {part.expected}")
        elif not isinstance(value, str) or not part.pattern.fullmatch(value):
            length = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
            problems.append(f"{names[place]}: expected {part.expected}, got {length} that do not match")
        else:
            inner = record
            for step in place[:-1]:
                inner = inner.setdefault(step, {})
            inner[place[-1]] = Secret(value) if "credentials" in place else value
    return record
