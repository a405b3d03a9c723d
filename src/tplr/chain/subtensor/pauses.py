"""The times for which endpoints have asked to be sent nothing: no connection to one of them sends or dials until then.

Several loops of a node use one endpoint, and each request of one of them could make the ban of all longer.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from bittensor._transport.errors import RpcPolicyRejection
from bittensor._transport.rpc import RpcSession

T = TypeVar("T")

# Some gateways say the time of their next reset instead of a number of seconds.
MAX_RETRY_SECONDS = 60.0


class EndpointPaused(RpcPolicyRejection):
    """Nothing was sent, because the endpoint has asked for that. The SDK treats it as the endpoint's own refusal."""


class EndpointPauses:
    """Until when each endpoint has asked to be sent nothing, for all connections of one node to the chain."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # URL -> seconds of the monotonic clock
        self._unsaid: set[str] = set()  # URLs whose present pause ``is_news`` has not reported

    def guard(self, session: RpcSession) -> None:
        """Make a new session raise EndpointPaused instead of sending or dialling, and note what its endpoint asks."""
        connect, request, batch = session._connect, session.request, session.request_batch

        def guarded(call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
            async def send(*args: Any) -> T:
                with self._kept(session.url):
                    return await call(*args)

            return send

        session._connect, session.request, session.request_batch = guarded(connect), guarded(request), guarded(batch)  # type: ignore[method-assign]

    def is_news(self, url: str) -> bool:
        """Return whether to log a failure at ``url``, in a pause only the first one, and note that it was asked."""
        if self._left(url) > 0 and url not in self._unsaid:
            return False
        self._unsaid.discard(url)
        return True

    def _left(self, url: str) -> float:
        return self._until.get(url, 0.0) - time.monotonic()

    @contextmanager
    def _kept(self, url: str) -> Iterator[None]:
        if (left := self._left(url)) > 0:
            raise EndpointPaused(f"it asked to be sent nothing for {left:.0f} s more", retry_after=str(left))
        try:
            yield
        except EndpointPaused:
            raise
        except RpcPolicyRejection as error:
            if self._left(url) <= 0:  # else another call was refused at the same time
                self._unsaid.add(url)
            self._until[url] = time.monotonic() + retry_seconds(error.retry_after)
            raise


def retry_seconds(retry_after: str | None) -> float:
    """Return the seconds that a gateway's refusal names, at most MAX_RETRY_SECONDS; 0 without a number."""
    with suppress(TypeError, ValueError):
        return min(max(0.0, float(retry_after)), MAX_RETRY_SECONDS)  # type: ignore[arg-type] - None, too
    return 0.0
