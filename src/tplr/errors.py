"""The exception tree: every error that a module of this package raises to its callers is one of these.

TplrError
├── ConfigError           the operator's configuration is wrong; lists every problem
│   ├── UnsupportedRuntime the chain's runtime lacks something that this version needs
│   └── HubUnavailable    the model hub does not answer: transient, unless the name should be a local folder
├── ChainError            the chain refused a call, or did not answer; ``name`` is the chain's error name
│   ├── ChainUnavailable  transient; ``fate_unknown`` if a write may have been included anyway
│   ├── NotRegistered     the hotkey has no uid on the subnet
│   ├── RateLimited       too soon or too much; ``retry_at`` is a block, or None
│   ├── NotPermitted      the neuron may not do this (validator permit, stake)
│   └── Rejected          the chain refused the content itself
├── StoreError            an object store refused a request or did not answer; names the bucket and the key
│   ├── ObjectNotFound    no such object or bucket
│   │   └── ScoresSealed  a score report that is published later
│   ├── AccessDenied      the credentials do not allow it
│   ├── PreconditionFailed  the object is not the requested one (ETag, create-only)
│   ├── ObjectTooLarge    larger than the caller allows; nothing was fetched
│   └── StoreUnavailable  transient: time-outs, throttling, broken connections, 5xx, a full disk
│       └── UploadDamaged the store refused a body that did not match its digest
├── PayloadError          a peer's bytes are not valid; ``reason`` says why
├── TrainingError         a gradient is not finite: there is nothing to send
├── DataError             the dataset is missing something or contradicts its manifest; also a ValueError
├── StateError            a saved state or checkpoint can't be used
│   └── FalseModel        a checkpoint holds another model than the one that it claims to be
├── Outdated              the run continues under rules that this node does not know
├── WindowLost            the updates of a past window are no longer available from any node
└── LocalnetError         a process of a localnet ended by itself, or did not start
"""

from collections.abc import Sequence


class TplrError(Exception):
    """Root of the tree."""


class ConfigError(TplrError):
    """Lists every setting that the operator has to change."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class UnsupportedRuntime(ConfigError):
    """The chain's runtime lacks a storage item, a call or an API that this version needs: a retry can't help."""


class HubUnavailable(ConfigError):
    """The hub that holds the tokenizer can't be reached now."""


class ChainError(TplrError):
    """The chain rejected a call or did not answer."""

    def __init__(self, message: str, *, name: str = "") -> None:
        self.name = name or type(self).__name__
        super().__init__(message)


class ChainUnavailable(ChainError):
    """No answer: retry later. After a write, read the chain before writing again.

    ``retry_after`` is the number of seconds for which the chain's node asks to send it nothing, 0 if it does not say.
    """

    def __init__(self, message: str, *, name: str = "", fate_unknown: bool = False, retry_after: float = 0.0) -> None:
        self.fate_unknown = fate_unknown
        self.retry_after = retry_after
        super().__init__(message, name=name)


class OtherChain(ChainUnavailable):
    """An endpoint serves another chain than the ``expected`` one; both are hashes of block 0, 0x-hex."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(
            f"it serves another chain, with genesis {found} instead of {expected}: remove it from the list"
        )


class Outdated(TplrError):
    """The run's rules changed, and this node does not know the new ones; its state is that of the change."""


class NotRegistered(ChainError):
    """The hotkey has no uid on this subnet."""


class RateLimited(ChainError):
    """Rejected for now; ``retry_at`` is the first block at which a retry may succeed, if known."""

    def __init__(self, message: str, *, name: str = "", retry_at: int | None = None) -> None:
        self.retry_at = retry_at
        super().__init__(message, name=name)


class NotPermitted(ChainError):
    """The neuron lacks the permit or the stake."""


class Rejected(ChainError):
    """The call is invalid: a retry can't help."""


class StoreError(TplrError):
    """A request to an object store failed. ``bucket`` and ``key`` name the object."""

    def __init__(self, message: str, *, bucket: str = "", key: str = "") -> None:
        self.bucket = bucket
        self.key = key
        where = f"{bucket}/{key}" if key else bucket
        super().__init__(f"{where}: {message}" if where else message)


class ObjectNotFound(StoreError):
    """No such object, or no such bucket."""


class ScoresSealed(ObjectNotFound):
    """Only the hash of a score report is published so far; the text says when the report will be readable."""


class AccessDenied(StoreError):
    """The credentials do not permit this request."""


class PreconditionFailed(StoreError):
    """The object changed, or exists where it must not."""


class ObjectTooLarge(StoreError):
    """The object is larger than the caller allows."""


class StoreUnavailable(StoreError):
    """The store can't be reached, perhaps temporarily or because of a fault at this node: no peer is penalized."""

    def __init__(self, message: str, *, bucket: str = "", key: str = "", retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message, bucket=bucket, key=key)


class UploadDamaged(StoreUnavailable):
    """The store rejected a body that did not match its digest; a retry may succeed."""


class PayloadError(TplrError):
    """A byte string from a peer is not a valid update; ``reason`` is published."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class EmptyUpdate(PayloadError):
    """An update whose every value is zero."""


class TrainingError(TplrError):
    """The model can't be trained on: a gradient is not finite."""


class DataError(TplrError, ValueError):
    """The dataset contradicts its manifest. Also a ValueError, which callers of ``next_pages`` expect."""


class StateError(TplrError):
    """A node's own saved state is incomplete, of another run or of another version."""


class FalseModel(StateError):
    """A checkpoint that matches its author's manifest, but is no model, or another one than most electors report."""


class WindowLost(TplrError):
    """The updates of a past window are no longer available from any node: continue from a later checkpoint."""


class LocalnetError(TplrError):
    """A localnet can't continue: one of its processes ended or did not start."""
