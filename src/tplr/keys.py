"""The only place where object names are written and parsed."""

import re

_PEERS = re.compile(r"peers_(\d{1,15})_v(.+)\.json")


def gradient_key(window: int, uid: int, version: str) -> str:
    """Packed update of ``uid`` for ``window``."""
    return f"gradient-{window}-{uid}-v{version}.safetensors"


def commit_key(window: int, uid: int, version: str) -> str:
    """Empty object whose metadata holds the hash of the update, written before the window ends."""
    return f"commit-{window}-{uid}-v{version}"


def debug_key(window: int, uid: int, version: str) -> str:
    """What ``uid`` holds after applying ``window``."""
    return f"debug-{window}-{uid}-v{version}.json"


def start_window_key(version: str) -> str:
    """First window of the run, written once by the highest-stake validator."""
    return f"start_window_v{version}.json"


def peers_key(first_effective_window: int, version: str) -> str:
    """Peer list that holds from ``first_effective_window`` on."""
    return f"peers_{first_effective_window}_v{version}.json"


PEERS_PREFIX = "peers_"


def parse_peers_key(key: str, version: str) -> int | None:
    """First effective window of a peer list's key, or None if the key is not one of this version."""
    match = _PEERS.fullmatch(key)
    return int(match[1]) if match and match[2] == version else None
