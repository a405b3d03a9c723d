"""A fork server: its processes share its imports, are separate programs, and end with it."""

import os
import subprocess
import sys

import pytest
from processes import alive, wait_until_ended

from tplr.errors import LocalnetError
from tplr.localnet.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")
ENV = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
# A module that allocates memory when it is imported, and reports the process of its import, and its own end.
LARGE = """
import os
DATA = bytearray(64 * 2**20)
IMPORTED_IN = os.getpid()
class Last:
    def __del__(self): print("dismantled", flush=True)
LAST = Last()
"""


@pytest.fixture
def serve(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    opened = []

    def server(*preloaded):
        env = ENV | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENV['PYTHONPATH']}"}
        opened.append(ForkServer(env=env, folder=tmp_path, log=tmp_path / "server.log", preloaded=preloaded))
        opened[-1].open()
        return opened[-1]

    yield server
    for one in opened:
        one.close()


def run(server, folder, *arguments, **env):
    with (folder / "log").open("ab") as log:
        return server.start([sys.executable, *arguments], env=env, folder=folder, stdout=log.fileno())


def test_what_is_imported_before_is_shared_and_programs_start_and_end_as_ever(serve, tmp_path):
    """But modules are not dismantled at the end, which would copy the memory that they share."""
    server = serve("large")
    server.wait_until_ready()
    (tmp_path / "script.py").write_text(
        "import atexit, large, os, sys, threading, time\n"
        "if __name__ == '__main__':\n"
        "    rows = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    own = sum(int(row.split()[1]) for row in rows if row.startswith('Private_Dirty'))\n"
        "    print(large.IMPORTED_IN == int(sys.argv[1]), own < 30_000, os.environ['A'], 'PYTHONPATH' in os.environ)\n"
        "    atexit.register(print, 'exit')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "    sys.exit(7)\n"
    )
    script = run(server, tmp_path, str(tmp_path / "script.py"), str(server.pid), A="1")
    assert script.wait(20) == script.poll() == 7
    module = run(server, tmp_path, "-m", "script", str(server.pid), A="2")
    assert module.wait(20) == 7
    assert (tmp_path / "log").read_text() == "".join(f"True True {a} False\nthread\nexit\n" for a in (1, 2))
    assert os.getpgid(script.pid) == script.pid  # a zombie: the id is not another process's


def test_processes_die_with_the_server(serve, tmp_path):
    server = serve()
    server.wait_until_ready()
    child = run(server, tmp_path, "-c", "import time; time.sleep(60)")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    os.kill(server.pid, 9)
    assert child.wait(20) == -9
    wait_until_ended(child.pid)
    with pytest.raises(LocalnetError, match="fork server"):
        run(server, tmp_path, "-c", "pass")


def test_a_server_that_has_threads_or_lacks_a_module_refuses(serve, tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()\n"
    )
    for module, said in (("threaded", "2 threads after the imports"), ("absent", "No module named 'absent'")):
        with pytest.raises(LocalnetError, match="did not start"):
            serve(module).wait_until_ready()
        assert said in (tmp_path / "server.log").read_text()


def test_a_server_dies_with_its_parent(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from tplr.localnet.fork_server import ForkServer\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"server = ForkServer(env={ENV!r}, folder=folder, log=folder / 'server.log', preloaded=())\n"
        "server.open(); server.wait_until_ready()\n"
        "with (folder / 'log').open('ab') as log:\n"
        f"    command = [{sys.executable!r}, '-c', 'import time; time.sleep(60)']\n"
        "    child = server.start(command, env={}, folder=folder, stdout=log.fileno())\n"
        "print(server.pid, child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(alive, pids))
        parent.kill()
    wait_until_ended(*pids)
