"""Python commands, each in its own process, forked from a process that has imported their modules."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import forked_python

from tplr.config import process_variables
from tplr.localnet.network import base_environment

FRAMES = re.compile(r"[\s│┃┏┓┗┛┡┩━─┼├┤└┘┴┬╇]+")


class ForkedCommands:
    """Runs commands with the start-up time of a fork."""

    def __init__(self, server: str, env: Mapping[str, str]) -> None:
        """``server``: socket of ``forked_python.py``. ``env``: environment without a node's variables."""
        self.env = env
        self._server = server

    async def run(self, command: Sequence[object], *, env: Mapping[str, str], folder: Path) -> tuple[int, str]:
        """Return exit status and output, including errors; ``command`` begins with the interpreter."""
        words = [*forked_python.interpreter(self._server), *command[1:]]
        process = await asyncio.create_subprocess_exec(
            *map(str, words),
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()


def unframed(printed: str) -> str:
    """Return the output without frames and line breaks of tables."""
    return FRAMES.sub(" ", printed)


@contextmanager
def forked_commands(folder: Path) -> Iterator[ForkedCommands]:
    """Commands forked from the server of ``scripts/test.sh``, or from an own one; ``folder`` gets the user's home."""
    env = base_environment(process_variables(), folder / "home")
    if running := process_variables().get(forked_python.SOCKET):
        yield ForkedCommands(running, env)
        return
    with tempfile.TemporaryDirectory() as place:  # a socket's path is short
        path = f"{place}/python"
        server = subprocess.Popen([sys.executable, forked_python.__file__, "--serve", path, str(os.getpid())], env=env)
        try:
            yield ForkedCommands(path, env)
        finally:
            server.kill()
            server.wait()
