"""A Python interpreter that has already imported the large libraries: a fork of a server that imported them once.

    python tests/support/forked_python.py --serve SOCKET PARENT_PID   # until the parent ends
    python tests/support/forked_python.py --at SOCKET ARGUMENT ...    # like "python ARGUMENT ...", in a fork

``scripts/test.sh`` starts the workers of pytest-xdist with it: each would otherwise import for ten seconds. The tests
of commands use the same server. A client passes it its standard streams, forwards signals, and ends like the fork.
"""

import contextlib
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path

SOCKET = "FORKED_PYTHON"  # variable with the path of the socket of the server of scripts/test.sh
START_SECONDS = 60.0  # until the server listens; its imports may take longer, and clients wait for them
MAX_REQUEST_BYTES = 2**17
LIBRARIES = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "bittensor",
    "h5py",
    "moto.server",
    "nbclient",
    "pandas",
    "prometheus_client",
    "scipy.stats",
    "torchdata.nodes",
)


def interpreter(path: str | None = None) -> list[str]:
    """Return the beginning of a command that runs Python.

    It is a fork of the server at ``path``, or of that of ``scripts/test.sh``; without one, it is a new interpreter.
    """
    path = path or os.environ.get(SOCKET)
    return [sys.executable, __file__, "--at", path] if path else [sys.executable]


def ask(path: str, arguments: list[str]) -> int:
    """Run ``python ARGUMENT ...`` in a fork with the streams, folder, variables and priority of this process.

    Returns its exit status; if a signal ended it, the same signal ends this process.
    """
    request = {"arguments": arguments, "env": dict(os.environ), "folder": str(Path.cwd())}
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                server.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline or not Path(path).parent.exists():  # the tests have been ended
                    raise
                time.sleep(0.1)
        socket.send_fds(server, [json.dumps([request, priority]).encode()], [0, 1, 2])
        if not (begun := server.recv(32)):
            sys.exit("forked_python: the server has ended; it said why on its standard error")
        pid = int(begun)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(server.recv(32) or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(path: str, parent: int) -> None:
    """Import everything, then fork for each request."""
    from tplr.localnet.fork_server import ENVIRONMENT, Request, run_as_main, thread_count
    from tplr.localnet.launch import die_with

    die_with(parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        os.environ |= ENVIRONMENT
        import_all()
        if (threads := thread_count()) > 1:
            sys.exit(f"forked_python: {threads} threads after the imports; a fork would copy the locks of the others")
        gc.collect()
        gc.freeze()  # a collection writes to every object that it visits
        server = os.getpid()
        while True:
            client, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
            if message and not os.fork():
                break
            client.close()  # an ended fork remains a zombie until the server ends
            for one in streams:
                os.close(one)
    die_with(server)
    waiting = os.getpid()
    if child := os.fork():
        client.send(str(child).encode())
        handle = os.pidfd_open(child)
        if handle not in select.select([client, handle], [], [])[0]:
            os.kill(child, signal.SIGKILL)  # the other side has ended
        _, ended = os.waitpid(child, 0)
        with contextlib.suppress(OSError):
            client.send(str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)
    die_with(waiting)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    request, priority = json.loads(message)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    run_as_main(Request(**request))


def import_all() -> None:
    """Import the package and ``LIBRARIES``."""
    import tplr

    packages = pkgutil.walk_packages(tplr.__path__, "tplr.", onerror=lambda _: None)
    for name in [one.name for one in packages if not one.name.endswith("__main__")] + [*LIBRARIES]:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            import_module(name)


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
