"""The exception tree: every error that leaves a part of this package is one of these.

TplrError
├── ConfigError           what the operator gave is wrong; lists every problem
│   ├── UnsupportedRuntime the chain's runtime lacks something that this version needs
│   └── HubUnavailable    the model hub does not answer: transient, unless the name is meant to be a folder here
├── ChainError            the chain said no, or could not be asked; ``name`` is the chain's own error name
│   ├── ChainUnavailable  transient; ``fate_unknown`` if a write may have landed all the same
│   ├── NotRegistered     the hotkey has no uid on the subnet
│   ├── RateLimited       too soon or too much; ``retry_at`` is a block, or None
│   ├── NotPermitted      the neuron may not do this (validator permit, stake)
│   └── Rejected          the chain refused the content itself
├── StoreError            an object store said no; names the bucket and the key
│   ├── ObjectNotFound    no such object or bucket
│   │   └── ScoresSealed  a score report that is published later
│   ├── AccessDenied      the credentials do not allow it
│   ├── PreconditionFailed  the object is not the one that was asked for (ETag, create-only)
│   ├── ObjectTooLarge    larger than the caller allows; nothing was fetched
│   └── StoreUnavailable  transient: time-outs, throttling, broken connections, 5xx, a full disk
│       └── UploadDamaged the store refused a body that did not fit its digest
├── PayloadError          a peer's bytes are not an update; ``reason`` says why
├── TrainingError         a gradient is not finite: there is nothing to send
├── DataError             the dataset is missing something or contradicts its manifest; also a ValueError
├── StateError            a node's own saved state can't be used
├── Outdated              the run continues under rules that this node does not know
├── WindowLost            the updates of a past window are nowhere any more
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
    """The chain's runtime lacks a storage item, a call or an API that this version needs: a retry fails alike."""


class HubUnavailable(ConfigError):
    """The hub that holds the tokenizer can't be reached now."""


class ChainError(TplrError):
    """The chain rejected a call or did not answer."""

    def __init__(self, message: str, *, name: str = "") -> None:
        self.name = name or type(self).__name__
        super().__init__(message)


class ChainUnavailable(ChainError):
    """No answer: retry later. After a write, read the chain before writing again."""

    def __init__(self, message: str, *, name: str = "", fate_unknown: bool = False) -> None:
        self.fate_unknown = fate_unknown
        super().__init__(message, name=name)


class Outdated(TplrError):
    """The run's rules changed, and this node does not know the new ones: its state is as they changed."""


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
    """The call is invalid: a retry fails in the same way."""


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
    """A score report of which only the hash is published yet; the text says when it will be readable."""


class AccessDenied(StoreError):
    """The credentials do not permit this request."""


class PreconditionFailed(StoreError):
    """The object changed, or exists where it must not."""


class ObjectTooLarge(StoreError):
    """The object is larger than the caller allows."""


class StoreUnavailable(StoreError):
    """The store can't be reached, perhaps temporarily or through a fault on our side: no peer is penalized."""

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


class WindowLost(TplrError):
    """The updates of a past window are deleted everywhere: only a later checkpoint helps."""


class LocalnetError(TplrError):
    """A localnet can't continue: one of its processes ended or did not start."""
