"""Starts nodes by forking a process that has imported all modules: they share its memory until they write to it.

``ForkServer`` starts the server, ``python -m tplr.localnet.fork_server``, and requests processes from it. The server
has one thread: a fork copies only the calling thread, and a lock held by another thread would stay locked in the copy.
A copy sets its environment, working directory and output, and then runs the command as a new interpreter would. All
copies have the server's hash seed, so they do not test whether an order of sets differs between processes.

Requests use a packet socket. A request is JSON (command, environment, folder) with four file descriptors: the standard
streams, and a socket on which the server sends the process id and, when the process ends, its status. An ended process
stays a zombie until the server ends, so that its id can't belong to another process when it is signalled.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tplr.config import replace_process_variables
from tplr.errors import LocalnetError
from tplr.localnet.launch import die_with

# All modules that nodes import, even late; a module missing here costs each node its memory and time.
PRELOADED = (
    "tplr.cli.node",
    "tplr.node.main",
    "tplr.node.startup",
    "tplr.localnet.attackers.hostile_node",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
)
# pyarrow's allocator would start a thread when it is loaded.
ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
MAX_REQUEST_BYTES = 2**17
START_SECONDS = 180.0  # to import everything, on a busy machine


class Forked:
    """A forked process, with the part of ``subprocess.Popen`` that ``Child`` uses.

    Attributes:
        returncode: exit status, negative for a signal; None while it runs.
    """

    def __init__(self, answers: socket.socket) -> None:
        """Raises LocalnetError if the server ended meanwhile."""
        self._answers = answers
        weakref.finalize(self, answers.close)
        self.returncode: int | None = None
        answers.settimeout(START_SECONDS)
        if not (first := answers.recv(32)):
            raise LocalnetError("the fork server ended")
        self.pid = int(first)

    def poll(self) -> int | None:
        """Update and return ``returncode``."""
        self._wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        self._wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> None:
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            # The answer stays in the socket for other threads that wait, so none needs a lock, with which a poll would
            # wait for them. A server that ends takes its processes with it, by SIGKILL.
            self.returncode = int(self._answers.recv(32, socket.MSG_PEEK) or -9)


class ForkServer:
    """A running server. ``close`` kills its processes.

    Must be opened in the main thread: Linux kills the server when the thread that forked it ends.
    """

    def __init__(
        self, *, env: Mapping[str, str], folder: Path, log: Path, preloaded: Sequence[str] = PRELOADED
    ) -> None:
        """``env``, ``folder`` and ``log`` are the server's own; ``env`` has the variables that imports read.

        ``preloaded``: modules to import.
        """
        self._env = {**env, **ENVIRONMENT}
        self._folder = folder
        self._log = log
        self._preloaded = preloaded
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None before ``open``."""
        return self._process.pid if self._process else None

    def open(self) -> None:
        """Start the server and return at once; call ``wait_until_ready`` before the first ``start``."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *self._preloaded],
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )

    def wait_until_ready(self) -> None:
        """Wait until the server has imported all modules. Blocks. Raises LocalnetError if it can't."""
        assert self._control is not None
        self._control.settimeout(START_SECONDS)
        try:
            ready = self._control.recv(32)
        except TimeoutError:
            ready = b""
        if not ready:
            raise LocalnetError(f"the fork server did not start; its log is {self._log}")

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        stdout: int,
        stdin: int | None = None,
        stderr: int | None = None,
    ) -> Forked:
        """Run ``python ARGUMENT...`` in its own process group; ``command`` begins with the interpreter.

        Streams are file descriptors, of which the caller keeps its own; without ``stdin`` it reads nothing, and without
        ``stderr`` it writes errors to ``stdout``.

        Raises:
            LocalnetError: the server ended.
        """
        assert self._control is not None
        request = json.dumps({"arguments": list(command[1:]), "env": {**env, **ENVIRONMENT}, "folder": str(folder)})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, Path(os.devnull).open() as nothing:
                streams = nothing.fileno() if stdin is None else stdin, stdout, stdout if stderr is None else stderr
                socket.send_fds(self._control, [request.encode()], [*streams, theirs.fileno()])
            return Forked(ours)
        except OSError as error:
            ours.close()
            raise LocalnetError(f"the fork server does not answer ({error}); its log is {self._log}") from error

    def close(self) -> None:
        """End the server and all processes that it started."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class _Request:
    arguments: list[str]
    env: dict[str, str]
    folder: str


def main() -> None:
    """Import all modules, then fork for each request until the other end of the socket is closed."""
    parent, control = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    die_with(parent)
    for name in sys.argv[3:]:
        import_module(name)
    if (threads := _thread_count()) > 1:
        sys.exit(f"fork server: {threads} threads after the imports; a fork would copy the locks of the others")
    gc.collect()
    gc.freeze()  # a collection writes to every object that it visits
    control.send(b"ready")
    if (request := _serve(control)) is not None:
        try:
            _run_as_main(request)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            _end(end.code or 0)
        _end(0)


def _serve(control: socket.socket) -> _Request | None:
    """Serve requests. Returns the request in each forked copy, and None in the server when it ends."""
    server = os.getpid()
    answers: dict[int, tuple[int, socket.socket]] = {}  # by file descriptor of the process
    while True:
        ready, _, _ = select.select([control, *answers], [], [])
        for handle in [one for one in answers if one in ready]:
            pid, answer = answers.pop(handle)
            _report_end(pid, answer)
            os.close(handle)
        if control not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not message:
            return None
        *streams, reply = descriptors
        answer = socket.socket(fileno=reply)
        if pid := os.fork():
            with contextlib.suppress(OSError):  # the copy may have set it already, or have ended
                os.setpgid(pid, pid)
            for stream in streams:
                os.close(stream)
            answer.send(str(pid).encode())
            answers[os.pidfd_open(pid)] = pid, answer
            continue
        os.setpgid(0, 0)
        die_with(server)
        for handle, (_, other) in answers.items():
            os.close(handle)
            other.close()
        control.close()
        answer.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return _Request(**json.loads(message))


def _report_end(pid: int, answer: socket.socket) -> None:
    """Send the status of an ended process, and leave it as a zombie."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError), answer:  # the reader may have closed its end
        answer.send(str(status).encode())


def _run_as_main(request: _Request) -> None:
    """Run the command line as the main program of this process."""
    replace_process_variables(request.env)
    os.chdir(request.folder)
    sys.path[:0] = [path for path in request.env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    match request.arguments:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(code, {"__name__": "__main__"})  # noqa: S102 - our own command line
        case ["-m", module, *_]:
            sys.argv = request.arguments[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_]:
            sys.argv = request.arguments
            runpy.run_path(script, run_name="__main__")


def _end(status: int) -> NoReturn:
    """End like an interpreter, but do not dismantle it: that writes to all modules, whose memory is shared with the
    server, and takes half a second."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # the interpreter reports why
    os._exit(status & 0xFF)


def _thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    main()
