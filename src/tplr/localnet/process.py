"""A child process that is started, killed or stopped on demand, logs to a file, and dies with its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path

from tplr.errors import LocalnetError
from tplr.localnet.fork_server import Forked, ForkServer

STOP_SECONDS = 10.0
LAUNCH = Path(__file__).with_name("launch.py")
TAIL_LINES = 15
TAIL_BYTES = 8192


class Child:
    """A process in its own process group, so that Ctrl-C in a terminal reaches only the parent.

    Must be started in the main thread: Linux kills the child when the thread that forked it ends.

    Attributes:
        command: command line of the next start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        folder: Path,
        log: Path,
        server: ForkServer | None = None,
    ) -> None:
        """``env`` is the whole environment, ``folder`` the working directory; ``log`` gets stdout and stderr.

        ``server`` forks the process if the command runs Python; None: start a new interpreter.
        """
        self.name = name
        self.log = log
        self.command = [str(part) for part in command]
        self._env = dict(env)
        self._folder = folder
        self._server = server
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._wanted = False

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def died(self) -> int | None:
        """Return the exit status (negative: signal number) if it ended without ``kill`` or ``stop``, else None."""
        return self._process.returncode if self._process and self._wanted and not self.running else None

    @property
    def pid(self) -> int | None:
        """Process id of the last start, None before the first."""
        return self._process.pid if self._process else None

    def start(self, more: Mapping[str, str] | None = None) -> None:
        """Start it with ``more`` added to its environment; append to its log. Raises RuntimeError if it runs."""
        if self.running:
            raise RuntimeError(f"{self.name} is already running")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**self._env, **(more or {})}
        with self.log.open("ab") as log:
            self._process = (
                self._server.start(self.command, env=env, folder=self._folder, stdout=log.fileno())
                if self._server
                else self._launched(env, log)
            )
        self._wanted = True

    def _launched(self, env: Mapping[str, str], log: BufferedWriter) -> subprocess.Popen[bytes]:
        # -I -S: the launcher needs only the standard library, and starts in a few milliseconds.
        launcher = [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid())]
        return subprocess.Popen(  # noqa: S603 - our own command line
            [*launcher, *self.command],
            env=env,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; do nothing if it is not running."""
        self._wanted = False
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """Suspend it with SIGSTOP until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> int | None:
        """Send SIGTERM, and SIGKILL after ``STOP_SECONDS``. Returns the exit status, None if it was never started."""
        self._wanted = False
        if self._process is None:
            return None
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)
            finally:  # also when cancelled
                self.kill()
        return self._process.returncode

    def check(self) -> None:
        """Raise LocalnetError, with the end of its log, if it ended without ``kill`` or ``stop``."""
        if (status := self.died) is not None:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            raise LocalnetError(f"{self.name} ended unexpectedly {how}; the end of {self.log}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])

    def _signal(self, number: int) -> None:
        if self.running:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.killpg(self._process.pid, number)
