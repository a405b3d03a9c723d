"""A Python interpreter that has already imported the large libraries: a fork of a server that imported them once.

    python tests/support/forked_python.py --serve SOCKET PARENT_PID   # until the parent ends
    python tests/support/forked_python.py --at SOCKET ARGUMENT ...    # like "python ARGUMENT ...", in a fork

``scripts/test.sh`` starts the workers of pytest-xdist with it: each would otherwise import for ten seconds. The tests
of commands use the same server. A client passes it its standard streams, forwards signals, and ends like the fork.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

    from tplr.localnet.fork_server import Forked, ForkServer

SOCKET = "FORKED_PYTHON"  # variable with the path of the socket of the server of scripts/test.sh
START_SECONDS = 60.0  # until the server listens; its imports may take longer, and clients wait for them
MAX_REQUEST_BYTES = 2**17


def interpreter(path: str | None = None) -> list[str]:
    """Return the beginning of a command that runs Python.

    It is a fork of the server at ``path``, or of that of ``scripts/test.sh``; without one, it is a new interpreter.
    """
    path = path or os.environ.get(SOCKET)
    return [sys.executable, __file__, "--at", path] if path else [sys.executable]


@functools.cache
def server() -> str | None:
    """Return the socket of the server of ``scripts/test.sh``, or of one that ends with this process.

    None on other systems than Linux, which have none.
    """
    if path := os.environ.get(SOCKET):
        return path
    if sys.platform != "linux":
        return None
    import shutil
    import subprocess
    import tempfile  # imports that a client of each command would wait for

    folder = tempfile.mkdtemp()  # a socket's path is short
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # a process with several threads can't fork
    subprocess.Popen([sys.executable, __file__, "--serve", f"{folder}/python", str(os.getpid())], env=alone)
    return f"{folder}/python"


def start(
    arguments: Sequence[str], *, env: Mapping[str, str], folder: Path, stdout: int
) -> "Forked | subprocess.Popen[bytes]":
    """Run ``python ARGUMENT ...`` in a fork that ends with the returned object; errors also go to ``stdout``.

    Unlike ``interpreter``, this gives the id of the fork itself. Without a server it is a new interpreter.
    """
    if (path := server()) is None:
        import subprocess

        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, cwd=folder, stdout=stdout, stderr=subprocess.STDOUT)
    from tplr.localnet.fork_server import Forked

    with Path(os.devnull).open() as nothing:
        streams = [nothing.fileno(), stdout, stdout]
        return Forked(requested(path, arguments, env=env, folder=folder, streams=streams))


def ask(path: str, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENT ...`` in a fork with the streams, folder, variables and priority of this process.

    Returns its exit status; if a signal ended it, the same signal ends this process.
    """
    with requested(path, arguments, env=os.environ, folder=Path.cwd(), streams=[0, 1, 2]) as answers:
        if not (begun := answers.recv(32)):
            sys.exit("forked_python: the server has ended; it said why on its standard error")
        pid = int(begun)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(answers.recv(32) or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def requested(
    path: str, arguments: Sequence[str], *, env: Mapping[str, str], folder: Path, streams: Sequence[int]
) -> socket.socket:
    """Return a connection on which the server at ``path`` answers with the fork's id, and later with its status."""
    request = {
        "command": [sys.executable, *arguments],
        "env": dict(env),
        "folder": str(folder),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection.connect(path)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline or not Path(path).parent.exists():  # the tests have been ended
                raise
            time.sleep(0.1)
    socket.send_fds(connection, [json.dumps(request).encode()], streams)
    return connection


def serve(path: str, parent: int) -> None:
    """Start commands for clients, each by a fork of a process that has imported everything."""
    from tplr.errors import LocalnetError
    from tplr.localnet.fork_server import ForkServer
    from tplr.localnet.launch import die_with

    die_with(parent)
    # Commands import the package from where the tests import it.
    search = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    env, log = {**os.environ, "PYTHONPATH": search}, Path(f"{path}.log")
    forks = ForkServer(env=env, folder=Path(path).parent, log=log, preloaded=["all_imports"])
    with contextlib.closing(forks), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        forks.open()
        try:
            forks.wait_until_ready()
        except LocalnetError:
            sys.exit(f"forked_python: {log.read_text()}")
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_attend, args=[client, forks], daemon=True).start()


def _attend(client: socket.socket, forks: "ForkServer") -> None:
    """Run the command of a client, and end it when the client ends."""
    with client:
        message, streams, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        names = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        try:
            process = forks.start(request["command"], env=request["env"], folder=Path(request["folder"]), **names)
        finally:
            for one in streams:
                os.close(one)
        os.setpriority(os.PRIO_PROCESS, process.pid, request["priority"])
        with contextlib.suppress(OSError):  # the client has ended, which is seen below
            client.send(str(process.pid).encode())
        ended = os.pidfd_open(process.pid)
        if ended not in select.select([client, ended], [], [])[0]:
            os.kill(process.pid, signal.SIGKILL)
        os.close(ended)
        with contextlib.suppress(OSError):  # the client has ended
            client.send(str(process.wait()).encode())


def main() -> None:
    """Serve, or ask the server."""
    match sys.argv[1:]:
        case ["--serve", path, parent]:
            serve(path, int(parent))
        case ["--at", path, *arguments]:
            sys.exit(ask(path, [one for one in arguments if one != "-u"]))  # forks have the server's buffers
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
