"""Python commands, each in its own process, forked from a process that has imported their modules."""

import asyncio
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import forked_python

from tplr.config import process_variables
from tplr.localnet.network import base_environment

FRAMES = re.compile(r"[\s│┃┏┓┗┛┡┩━─┼├┤└┘┴┬╇]+")


class ForkedCommands:
    """Runs commands with the start-up time of a fork."""

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the user's home.

        Attributes:
            env: environment without a node's variables.
        """
        self.env = base_environment(process_variables(), folder / "home")

    async def run(self, command: Sequence[object], *, env: Mapping[str, str], folder: Path) -> tuple[int, str]:
        """Return exit status and output, including errors; ``command`` begins with the interpreter."""
        words = [*forked_python.interpreter(forked_python.server()), *command[1:]]
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
