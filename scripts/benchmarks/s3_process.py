"""Runs the S3 server in a separate process, so that a client is measured without it."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def start_server(folder: Path, stack: ExitStack, keys: Mapping[str, Any], *options: str) -> str:
    """Start a server that ends with ``stack``; return its endpoint.

    Args:
        folder: for its objects and files.
        keys: its key table.
        options: of its command line.

    Raises:
        RuntimeError: it did not start.
    """
    (folder / "keys.json").write_text(json.dumps(keys))
    command = [sys.executable, "-m", "tplr.testing.s3server", "--root", folder / "objects", "--port", "0", *options]
    command += ["--keys", folder / "keys.json", "--ready-file", folder / "ready.json"]
    server = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    while not (folder / "ready.json").exists():
        if server.poll() is not None:
            raise RuntimeError(f"the S3 server ended with status {server.returncode}")
        time.sleep(0.05)
    ready = json.loads((folder / "ready.json").read_text())
    return f"http://{ready['host']}:{ready['port']}"
