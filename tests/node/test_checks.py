"""Start-up checks: who is to blame decides the exit status, and nothing is waited for longer than said."""

import asyncio
import threading
import time

import pytest

from tplr.errors import ChainUnavailable, ConfigError, HubUnavailable, StoreUnavailable, TplrError
from tplr.node.checks import MISCONFIGURED, OUTSIDE_DOWN, Checks
from tplr.node.startup import in_daemon_thread


def fail(error: TplrError) -> None:
    raise error


@pytest.mark.parametrize("error", [ChainUnavailable("mute"), StoreUnavailable("503"), HubUnavailable("no hub")])
def test_what_is_down_outside_is_another_status_than_what_is_wrong_here(error: TplrError, capsys) -> None:
    checks = Checks()
    assert checks.take("one", fail, error) is None
    assert checks.status == OUTSIDE_DOWN
    checks.show()
    assert "something outside is down, try again" in " ".join(capsys.readouterr().err.split())
    checks.take("two", fail, ConfigError(["a is missing", "b is missing"]))
    checks.take("two", fail, ConfigError("a is missing"))
    assert checks.status == MISCONFIGURED
    assert [problem.text for problem in checks.problems] == [str(error), "a is missing", "b is missing"]


async def test_what_does_not_answer_is_given_up() -> None:
    checks = Checks()
    assert await checks.wait("bucket", asyncio.sleep(3600), seconds=0.05) is None
    assert checks.status == OUTSIDE_DOWN
    assert checks.outside_down("bucket")
    assert not checks.outside_down("chain")
    assert "no answer within 0.05 s" in checks.problems[0].text


async def test_a_time_out_of_the_check_s_own_is_an_error() -> None:
    async def broken() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await Checks().wait("bucket", broken())


async def test_a_daemon_thread_s_result_or_error_comes_back() -> None:
    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(ConfigError, match="wrong"):
        await in_daemon_thread(lambda: fail(ConfigError("wrong")))


def test_nobody_waits_for_a_thread_that_hangs() -> None:
    release = threading.Event()

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await in_daemon_thread(release.wait)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert time.monotonic() - began < 30
    release.set()
