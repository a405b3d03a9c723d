"""A finished run in a folder is open for several commands at once."""

from contextlib import AsyncExitStack

from tplr.localnet.reopen import open_finished
from tplr.node.replay import published_windows


async def test_two_commands_read_a_finished_run_at_once(recorded):
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        one = await first.enter_async_context(open_finished(recorded.folder))
        other = await second.enter_async_context(open_finished(recorded.folder))
        windows = await published_windows(one, one.validator(), "debug")
        assert windows
        await first.aclose()  # the first command ends, the second goes on
        assert await published_windows(other, other.validator(), "debug") == windows
