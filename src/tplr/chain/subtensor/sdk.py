"""The SDK's errors as ours, and calls of the SDK that neither leave errors behind nor break each other."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import bittensor as bt

from tplr.chain import rules
from tplr.chain.subtensor.pauses import retry_seconds
from tplr.errors import (
    ChainError,
    ChainUnavailable,
    NotPermitted,
    NotRegistered,
    RateLimited,
    Rejected,
    UnsupportedRuntime,
)
from tplr.urls import only_origins

T = TypeVar("T")

# Errors that the SDK raises; a storage item that the runtime lacks is a ValueError.
SDK_ERRORS = (bt.BittensorError, ValueError, OSError, TimeoutError)
# Errors of the pool about the extrinsic (nonce, age, priority), not the call: it may be included or sent again.
PASSING = frozenset(
    {
        "AlreadyImported",
        "AncientBirthBlock",
        "Dropped",
        "ExhaustsResources",
        "FinalityTimeout",
        "Future",
        "Invalid",
        "PriorityTooLow",
        "Retracted",
        "Stale",
        "Usurped",
    }
)
# Texts of the SDK's ValueErrors about something that the connected runtime lacks.
LACKING = ("not found in registry", "not found in this runtime", "this runtime does not declare")
# Names for failed reads that the SDK raises without a name, by their text.
NAMELESS = {"State discarded": "StateDiscarded", "no block at height": "UnknownBlock"}
BY_CODE: dict[bt.ErrorCode, type[ChainError]] = {
    bt.ErrorCode.NOT_REGISTERED: NotRegistered,
    bt.ErrorCode.RATE_LIMITED: RateLimited,
    bt.ErrorCode.NOT_AUTHORIZED: NotPermitted,
    bt.ErrorCode.INSUFFICIENT_BALANCE: NotPermitted,
    bt.ErrorCode.INVALID_ARGUMENT: Rejected,
}


def translate(error: Exception, *, sent: bool) -> ChainError | UnsupportedRuntime:
    """Translate an SDK error to one of ours: by the chain's name, then by code, else to ChainUnavailable.

    Args:
        sent: a call was to be sent, and may have reached a node before it failed.
    """
    if isinstance(error, bt.ChainError):
        # The chain refuses calls only. The SDK derives names and codes of failed reads from words in the message, such
        # as "rate limit" in that of a gateway.
        name = (error.name or "") if sent else ""
        if name in rules.ERRORS:
            return rules.refusal(name, error.message)
        if sent and name not in PASSING:
            if error.code in BY_CODE:
                return BY_CODE[error.code](error.message, name=name)
            if name:
                return Rejected(f"{name}: {error.message}", name=name)
        if not name:
            name = next((ours for words, ours in NAMELESS.items() if words in error.message), "")
        advice = ": ask a node that keeps it (--subtensor.archive)" if name == "StateDiscarded" else ""
        message = only_origins(error.message)
        return ChainUnavailable(f"{name or 'no answer'}: {message}{advice}", name=name, fate_unknown=sent)
    if type(error) is bt.BittensorError:
        # The SDK's argument checks raise this base class, before anything is sent.
        return Rejected(str(error), name="InvalidArgument")
    return _translate(error, sent=sent)


def _translate(error: Exception, *, sent: bool) -> ChainUnavailable | UnsupportedRuntime:
    """Translate an error that is not the chain's: the runtime lacks something, or there was no answer."""
    detail = only_origins(str(error)) or "no answer in time"
    if type(error).__name__ == "StorageFunctionNotFound" or any(words in detail for words in LACKING):
        return UnsupportedRuntime(
            f"the chain's runtime lacks something that tplr needs: {detail}: update tplr and bittensor "
            f"({bt.__version__} is installed), or check --subtensor.network"
        )
    # The SDK raises ValueError while it composes a call, before anything is sent.
    unknown = sent and not isinstance(error, ValueError)
    name = type(error).__name__
    wait = retry_seconds(error.retry_after) if isinstance(error, bt.RpcPolicyError) else 0.0
    return ChainUnavailable(f"{name}: {detail}", name=name, fate_unknown=unknown, retry_after=wait)


async def owned(call: Awaitable[T]) -> T:
    """Await a call of the SDK, and retrieve the error of the connection that the SDK may open for it.

    The SDK never awaits the task of a connection, so asyncio would log each one that ends with an error. Its calls
    share the download of a runtime's metadata: if one of them is cancelled, the others would end as if they were, too.

    Raises:
        ConnectionError: another call was cancelled.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.sleep(0)  # the first step of the call opens the connection
        for session in asyncio.all_tasks():
            if session.get_name() == "rpc-session":
                session.remove_done_callback(_retrieve)  # a connection serves many calls, and needs one callback
                session.add_done_callback(_retrieve)
        return await task
    except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
        if (this := asyncio.current_task()) and this.cancelling():
            raise
        raise ConnectionError("a call that shared a request with this one was cancelled") from error
    finally:
        task.cancel()


def _retrieve(ended: asyncio.Task[Any]) -> None:
    if not ended.cancelled():
        ended.exception()
