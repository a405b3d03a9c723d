"""Python commands, each in its own process, forked from a process that has imported their modules."""

import asyncio
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tplr.config import process_variables
from tplr.localnet.fork_server import PRELOADED, ForkServer
from tplr.localnet.network import base_environment

FRAMES = re.compile(r"[\s│┃┏┓┗┛┡┩━─┼├┤└┘┴┬╇]+")


class ForkedCommands:
    """Runs commands with the start-up time of a fork."""

    def __init__(self, server: ForkServer, env: Mapping[str, str]) -> None:
        """``env``: environment of the server, without a node's variables."""
        self.env = env
        self._server = server

    async def run(self, command: Sequence[object], *, env: Mapping[str, str], folder: Path) -> tuple[int, str]:
        """Return exit status and output, including errors."""
        with tempfile.TemporaryFile() as output:
            words = [str(word) for word in command]
            process = await asyncio.to_thread(self._server.start, words, env=env, folder=folder, log=output)
            status = await asyncio.to_thread(process.wait)
            output.seek(0)
            return status, output.read().decode()


def unframed(printed: str) -> str:
    """Return the output without frames and line breaks of tables."""
    return FRAMES.sub(" ", printed)


@contextmanager
def forked_commands(folder: Path) -> Iterator[ForkedCommands]:
    """A server that forks commands until the block ends; ``folder`` gets its log."""
    env = base_environment(process_variables(), folder / "home")
    server = ForkServer(env=env, folder=folder, log=folder / "fork-server.log", preloaded=("tplr.cli.join", *PRELOADED))
    server.open()
    try:
        server.wait_until_ready()
        yield ForkedCommands(server, env)
    finally:
        server.close()
