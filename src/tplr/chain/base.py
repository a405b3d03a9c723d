"""The protocol of a chain, and its records."""

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Block:
    """A final block. ``hash`` is 0x-hex; ``time`` is the on-chain timestamp in Unix seconds (block 0: 1970)."""

    number: int
    hash: str
    time: float


@dataclass(frozen=True)
class Neuron:
    """One uid at one block. ``stake`` in alpha; ``permit``: may set weights; ``incentive``: share in [0, 1]."""

    uid: int
    hotkey: str
    coldkey: str
    stake: float
    permit: bool
    last_update: int
    incentive: float = 0.0


@dataclass(frozen=True)
class Metagraph:
    """Neurons registered at ``block``, ordered by uid."""

    block: int
    neurons: tuple[Neuron, ...]

    def by_hotkey(self) -> dict[str, Neuron]:
        """Return the neurons by hotkey, in uid order."""
        return {neuron.hotkey: neuron for neuron in self.neurons}

    def uid_of(self, hotkey: str) -> int | None:
        """Return the uid that ``hotkey`` holds, or None if it holds none."""
        return next((neuron.uid for neuron in self.neurons if neuron.hotkey == hotkey), None)


@dataclass(frozen=True)
class Commitment:
    """The last commitment of ``hotkey`` (at most 128 bytes, not validated), and its block."""

    hotkey: str
    block: int
    data: str


class Chain(Protocol):
    """Access of one hotkey to one subnet. Bound to the event loop that first uses it.

    Every method may raise ``ChainUnavailable``: try again later. Reads of a given ``block`` raise it if the block does
    not exist yet, or is so old that an ordinary node has dropped its state (about 256 blocks).

    ``head`` and ``blocks`` follow the best block, which another block of the same number may replace. ``block`` returns
    final blocks only: every value that all nodes must agree on comes from it.

    Attributes:
        genesis: hash of block 0, 0x-hex, which identifies the chain.
        netuid: of the subnet.
    """

    genesis: str
    netuid: int
    hotkey: str
    block_time: float

    async def head(self) -> int:
        """Return the number of the newest block; it may step back by one between calls."""
        ...

    def blocks(self) -> AsyncGenerator[int, None]:
        """Yield every block number once, ascending, without gaps, from the present head on; endless, reconnects."""
        ...

    async def block(self, number: int) -> Block:
        """Read a block. Raises ``ChainUnavailable``, named ``NotFinal`` while the block may still be replaced."""
        ...

    async def metagraph(self, block: int | None = None) -> Metagraph:
        """Read the neurons registered at ``block`` (default: head)."""
        ...

    async def commitments(self, hotkeys: Collection[str], block: int | None = None) -> dict[str, Commitment]:
        """Read the latest commitments of these hotkeys, registered or not; those that made none are left out."""
        ...

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        """Read the weights in force, ``{validator uid: {uid: fraction}}``; each validator's fractions sum to 1."""
        ...

    async def max_weight(self) -> float:
        """Read the largest share that a uid may get of a validator's weights: ``set_weights`` lowers larger ones."""
        ...

    async def commit(self, data: str) -> int:
        """Replace this hotkey's commitment; waits for inclusion and returns its block.

        Raises:
            NotRegistered, RateLimited: the chain refused.
            Rejected: more than 128 bytes.
            ChainUnavailable: with ``fate_unknown`` if it may have landed.
        """
        ...

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        """Set this validator's weights (relative, at least 0); waits for inclusion and returns its block.

        If the subnet seals weights (commit-reveal), they come into force some epochs later.

        Raises:
            NotRegistered, NotPermitted, RateLimited: the chain refused.
            Rejected: an unknown uid, too few uids, or only zeros.
            ChainUnavailable: with ``fate_unknown`` if it may have landed.
        """
        ...

    def sign(self, message: bytes) -> bytes:
        """Sign with this hotkey: 64 bytes, for ``hotkeys.verify``. Raises ConfigError without its private key.

        Messages must be shorter than 256 bytes, because a longer transaction payload is signed as its bare hash.
        """
        ...

    async def close(self) -> None:
        """Release the connection; idempotent."""
        ...
