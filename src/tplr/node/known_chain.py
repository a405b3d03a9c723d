"""The chain that a node's state belongs to, by its genesis: a later start must not join another one.

The networks' names tell the chain, but of most networks no genesis is known in advance, and the first endpoint that
answers would decide.
"""

import re
from pathlib import Path

from tplr.errors import ConfigError, OtherChain, StateError
from tplr.files import atomic_write

FILE = "genesis"


def remember_chain(folder: Path, genesis: str) -> None:
    """Keep the hash of block 0 of this state's chain, 0x-hex, if there is none yet. Raises StateError."""
    if not (folder / FILE).exists():
        atomic_write(folder / FILE, f"{genesis}\n".encode())


def known_genesis(folder: Path) -> str | None:
    """Return what ``remember_chain`` has kept; None if there is nothing. Raises ConfigError, StateError."""
    path = folder / FILE
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"can't read {path}: {error.strerror or error}: check the folder") from error
    if not re.fullmatch(r"0x[0-9a-f]{1,64}", text):
        raise ConfigError(f"{path}: expected the hash of a chain's block 0: delete this file")
    return text


def moved_to_other_chain(folder: Path, error: OtherChain) -> ConfigError:
    """Return the error of a start at another chain than the state's."""
    return ConfigError(
        f"the endpoint's chain has genesis {error.found}, but the state of this node is of the chain with genesis "
        f"{error.expected}: check --subtensor.network; if this node is to join the other chain, give another --state, "
        f"or delete {folder / FILE}"
    )
