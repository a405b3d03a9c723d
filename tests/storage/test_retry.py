"""When a call is retried, the length of pauses, and the effect of the deadline."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from tplr.errors import ObjectNotFound, StoreUnavailable
from tplr.storage.retry import with_retry


class Script:
    """A call that raises its errors one after the other, then answers; the last error stays."""

    def __init__(self, *errors: Exception, then: str | None = None) -> None:
        self.errors = list(errors)
        self.then = then
        self.calls = 0
        self.sleeps: list[float] = []

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors and (self.then is not None or len(self.errors) > 1):
            raise self.errors.pop(0)
        if self.errors:
            raise self.errors[0]
        assert self.then is not None
        return self.then

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)


async def test_repeats_until_an_answer() -> None:
    script = Script(StoreUnavailable("1"), StoreUnavailable("2"), then="answer")
    assert await with_retry(script, deadline_seconds=60, sleep=script.sleep) == "answer"
    assert script.calls == 3


async def test_only_unavailable_is_repeated() -> None:
    script = Script(StoreUnavailable("1"), ObjectNotFound("gone"), then="never")
    with pytest.raises(ObjectNotFound):
        await with_retry(script, deadline_seconds=60, sleep=script.sleep)
    assert script.calls == 2


async def test_pauses_double_up_to_the_cap_and_are_jittered() -> None:
    errors = [StoreUnavailable(str(n)) for n in range(6)]
    for jitter, expected in [(1.0, [1, 2, 4, 8, 8, 8]), (0.25, [0.25, 0.5, 1, 2, 2, 2])]:
        script = Script(*errors, then="answer")
        await with_retry(
            script,
            deadline_seconds=1000,
            base_seconds=1,
            cap_seconds=8,
            jitter=lambda jitter=jitter: jitter,
            sleep=script.sleep,
        )
        assert script.sleeps == expected


async def test_the_store_s_own_pause_comes_first() -> None:
    script = Script(StoreUnavailable("throttled", retry_after=7.0), then="answer")
    await with_retry(script, deadline_seconds=60, base_seconds=1, jitter=lambda: 0.5, sleep=script.sleep)
    assert script.sleeps == [7.5]


async def test_no_pause_beyond_the_deadline() -> None:
    script = Script(StoreUnavailable("throttled", retry_after=1e9))
    with pytest.raises(StoreUnavailable, match="throttled"):
        await with_retry(script, deadline_seconds=60, sleep=script.sleep)
    assert (script.calls, script.sleeps) == (1, [])


async def test_the_last_error_is_told_at_the_deadline() -> None:
    script = Script(*(StoreUnavailable(str(n)) for n in range(3)))
    with pytest.raises(StoreUnavailable, match="2"):
        await with_retry(script, deadline_seconds=0.2, base_seconds=0.001, cap_seconds=0.001)
    assert script.calls > 3


async def test_a_call_that_hangs_is_cancelled_at_the_deadline() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(StoreUnavailable, match="no answer within"):
        await with_retry(hang, deadline_seconds=0.05)
    assert cancelled.is_set()


async def test_another_s_time_out_is_not_ours() -> None:
    async def call() -> None:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else"):
        await with_retry(call, deadline_seconds=60)


async def test_cancellation_ends_the_pause() -> None:
    script = Script(StoreUnavailable("1"), then="answer")
    task = asyncio.create_task(with_retry(script, deadline_seconds=1000, base_seconds=900, jitter=lambda: 1.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == 1


async def test_what_the_call_holds_is_freed_when_it_has_failed() -> None:
    """Not only at the next garbage collection, because it may be a large body."""

    class Body:
        pass

    def make() -> tuple[Callable[[], Awaitable[None]], weakref.ref[Body]]:
        body = Body()

        async def call() -> None:
            raise StoreUnavailable(f"not sent: {body}")

        return call, weakref.ref(body)

    call, held = make()
    gc.disable()
    try:
        with contextlib.suppress(StoreUnavailable):
            await with_retry(call, deadline_seconds=0.1, jitter=lambda: 1.0)
        del call
        assert held() is None
    finally:
        gc.enable()
