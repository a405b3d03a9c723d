"""The only module that builds and parses object keys."""

import re
import secrets
from collections.abc import Iterable
from numbers import Integral
from typing import Literal, NamedTuple, Self, get_args

# The kinds of state dicts that a node publishes for a window.
StateKind = Literal["gradient", "checkpoint", "debug", "aggregator"]
MAX_UID, MAX_WINDOW = 2**16 - 1, 10**15 - 1

_PEERS = re.compile(r"peers_(\d{1,15})_v(.+)\.json")


class RunVersion(str):
    """The version in the keys of a run's objects, which changes with the window of each upgrade.

    As a text it is the run's first version, which is used for the object without a window: the start window.

    Attributes:
        changes: first window and version of each, ascending.
    """

    changes: tuple[tuple[int, str], ...]

    def __new__(cls, first: str, changes: Iterable[tuple[int, str]] = ()) -> Self:
        self = super().__new__(cls, first)
        self.changes = tuple(changes)
        return self


def version_at(version: str, window: int) -> str:
    """Return the version of ``window``'s objects: of a ``RunVersion`` the one in force then; another text unchanged."""
    changes = version.changes if isinstance(version, RunVersion) else ()
    return next((then for first, then in reversed(changes) if window >= first), str(version))


def gradient_key(window: int, uid: int, version: str) -> str:
    """Packed update of ``uid`` for ``window``."""
    return f"gradient-{window}-{uid}-v{version_at(version, window)}.safetensors"


def commit_key(window: int, uid: int, version: str) -> str:
    """Empty object whose metadata contains the hash of the update, written before the window ends."""
    return f"commit-{window}-{uid}-v{version_at(version, window)}"


def debug_key(window: int, uid: int, version: str) -> str:
    """Report of ``uid`` on its model after it applied ``window``."""
    return f"debug-{window}-{uid}-v{version_at(version, window)}.json"


def scores_key(window: int, uid: int, version: str) -> str:
    """Observations of validator ``uid`` in ``window``, and the resulting scores."""
    return f"scores-{window}-{uid}-v{version_at(version, window)}.json"


def scores_seal_key(window: int, uid: int, version: str) -> str:
    """Hash of the document of ``scores_key``, published before it."""
    return f"scores-seal-{window}-{uid}-v{version_at(version, window)}.json"


def evaluation_key(window: int, uid: int, version: str) -> str:
    """Evaluation by ``uid`` of the model that has applied ``window``."""
    return f"evaluation-{window}-{uid}-v{version_at(version, window)}.json"


def state_key(kind: StateKind, window: int, uid: int, version: str) -> str:
    """State dict of ``uid`` for ``window``; the key of an aggregate has no uid.

    Raises:
        ValueError: invalid kind, uid or window: no node would find the object, and no clean-up would delete it.
    """
    if kind not in get_args(StateKind):
        raise ValueError(f"key {kind!r}: expected one of {', '.join(get_args(StateKind))}")
    for name, value, largest in (("uid", uid, MAX_UID), ("window", window, MAX_WINDOW)):
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= value <= largest:
            raise ValueError(f"{name} {value!r}: expected an integer from 0 to {largest}")
    version = version_at(version, int(window))
    if kind == "aggregator":
        return f"aggregator-{window}-v{version}.safetensors"
    return f"{kind}-{window}-{uid}-v{version}.safetensors"


def included_key(window: int, version: str) -> str:
    """Included set of ``window``, published by the aggregator."""
    return f"aggregator-{window}-v{version_at(version, window)}.json"


def vote_key(window: int | None, uid: int, version: str) -> str:
    """Vote of elector ``uid`` on ``window``, or on the start of the run if None."""
    return f"vote-{_subject(window)}-{uid}-v{version_at(version, window or 0)}.json"


def echo_key(window: int | None, slot: int, uid: int, version: str) -> str:
    """Relay of elector ``uid``, with its echo, in a slot of that election."""
    return f"echo-{_subject(window)}-{slot}-{uid}-v{version_at(version, window or 0)}.json"


def status_key(window: int | None, slot: int, uid: int, version: str) -> str:
    """Status of elector ``uid`` at the start of a slot of that election."""
    return f"status-{_subject(window)}-{slot}-{uid}-v{version_at(version, window or 0)}.json"


def decision_key(window: int | None, version: str) -> str:
    """Decision of an elector: the value that it is committed to."""
    return f"decision-start-v{version}.json" if window is None else included_key(window, version)


def _subject(window: int | None) -> str:
    return "start" if window is None else str(window)


def checkpoint_prefix(window: int, uid: int, version: str) -> str:
    """Common prefix of the objects of a checkpoint: the model of ``uid`` before it applies ``window``."""
    return f"checkpoint-{window}-{uid}-v{version_at(version, window)}/"


class WindowKey(NamedTuple):
    """The parts of an object's key. ``uid`` is None for an aggregate."""

    kind: str
    window: int
    uid: int | None


_WINDOW_KEY = re.compile(
    r"(?:(?P<kind>gradient|commit|debug|scores-seal|scores|checkpoint|evaluation|vote)"
    r"-(?P<window>\d{1,15})-(?P<uid>\d{1,5})"
    r"|(?P<slotted>echo|status)-(?P<of>\d{1,15})-\d{1,15}-(?P<by>\d{1,5})"
    r"|(?P<common>aggregator)-(?P<about>\d{1,15}))"
    r"-v(?P<version>[^./]+)(?:\.safetensors|\.json|/.+)?"
)


def parse_window_key(key: str, version: str) -> WindowKey | None:
    """Parse the key of an object of a window: one of the above, or a part of a checkpoint.

    Returns None for any other key, or one of another version.
    """
    match = _WINDOW_KEY.fullmatch(key)
    if not match:
        return None
    window = int(match["window"] or match["of"] or match["about"])
    if match["version"] != version_at(version, window):
        return None
    uid = match["uid"] or match["by"]
    kind = match["kind"] or match["slotted"] or match["common"]
    return WindowKey(kind, window, None if uid is None else int(uid))


class RunKey(NamedTuple):
    """The parts of the key of an object of any run, None if the key lacks them. The key of a test object lacks all."""

    version: int | None
    uid: int | None
    window: int | None


# How the keys of all objects of runs, and of test objects, begin, and their complete forms, of every version.
RUN_PREFIXES = (
    *("gradient-", "commit-", "debug-", "scores-", "checkpoint-", "evaluation-", "vote-", "echo-", "status-"),
    *("aggregator-", "decision-start-v", "start_window_v", "peers_", "page_v", "probe-"),
)
_RUN_KEYS = tuple(
    re.compile(form.replace("W", r"(?P<window>\d{1,15})").replace("U", r"(?P<uid>\d{1,5})-v(?P<version>\d{1,9})"))
    for form in (
        r"(?:gradient|debug|checkpoint)-W-U\.safetensors",
        r"commit-W-U",
        r"(?:debug|scores|scores-seal|evaluation|vote)-W-U\.json",
        r"(?:echo|status)-W-\d{1,15}-U\.json",
        r"checkpoint-W-U/(?:manifest\.json|shard-\d{1,5}-\d{1,5}\.safetensors)",
        r"(?:vote-start|(?:echo|status)-start-\d{1,15})-U\.json",
        r"aggregator-W-v(?P<version>\d{1,9})\.(?:json|safetensors)",
        r"peers_W_v(?P<version>\d{1,9})\.json",
        r"(?:decision-start-|start_window_)v(?P<version>\d{1,9})\.json",
        r"page_v(?P<version>\d{1,9})\.(?:html|json)",
        r"probe-[0-9a-f]{16}(?:-[a-z0-9-]+)?",
    )
)


def parse_run_key(key: str) -> RunKey | None:
    """Parse the key of an object of any run and version, except software versions, or of a test object.

    Returns None for every other key.
    """
    for form in _RUN_KEYS:
        if match := form.fullmatch(key):
            found = {name: int(number) for name, number in match.groupdict().items()}
            return RunKey(found.get("version"), found.get("uid"), found.get("window"))
    return None


def start_window_key(version: str) -> str:
    """First window of the run, written once by each elector."""
    return f"start_window_v{version}.json"


def page_key(version: str) -> str:
    """The page of a run."""
    return f"page_v{version}.html"


def page_document_key(version: str) -> str:
    """The document that the page shows."""
    return f"page_v{version}.json"


def peers_key(first_effective_window: int, version: str) -> str:
    """Peer list that applies from ``first_effective_window`` on."""
    return f"peers_{first_effective_window}_v{version_at(version, first_effective_window)}.json"


PEERS_PREFIX = "peers_"


def parse_peers_key(key: str, version: str) -> int | None:
    """Return the first effective window in a peer list's key, or None if the key is not one of this version."""
    match = _PEERS.fullmatch(key)
    return int(match[1]) if match and match[2] == version_at(version, int(match[1])) else None


def software_key(uid: int) -> str:
    """Software versions of ``uid``; the key has no version, so that nodes of every version find it."""
    return f"software-{uid}.json"


def probe_key() -> str:
    """Object that tests a bucket, new in each call; a test that needs several of them appends ``-`` and a name."""
    return f"probe-{secrets.token_hex(8)}"
