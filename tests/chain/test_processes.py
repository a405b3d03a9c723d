"""One chain file, several processes, blocks of a quarter of a second, and SIGKILL."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import aclosing

import pytest

from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.chain.rules import ChainLimits

# Follows a number of blocks while committing as fast as the chain accepts it; prints the blocks it saw.
NODE = """
import asyncio, json, sys
from tplr.chain.local import LocalChain

async def main(path, hotkey, blocks):
    async with LocalChain(path, hotkey) as chain:
        goal = await chain.head() + blocks
        async def write():
            made = []
            while await chain.head() < goal:
                made.append((await chain.commit(f"{hotkey} {len(made)}"), len(made)))
            return made
        async def follow():
            seen = []
            async for number in chain.blocks():
                seen.append(number)
                if number >= goal:
                    return seen
        made, seen = await asyncio.gather(write(), follow())
        blocks = [await chain.block(number) for number in range(goal)]
        hashes, times = [block.hash for block in blocks], [block.time for block in blocks]
        print(json.dumps({"made": made, "seen": seen, "hashes": hashes, "times": times}))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

# Writes all the time, so that a kill hits it in the middle of it.
VICTIM = """
import sys
from tplr.chain.ledger import Ledger
ledger = Ledger(sys.argv[1])
print("writing", flush=True)
while True:
    ledger.submit("two", "commit", "x" * 128)
    ledger.look()
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "chain.db"
    Ledger.create(path, block_time=0.25, finality_lag=0, limits=ChainLimits(commitment_quota=10**6), skipped_slots=0.1)
    admin = Ledger(path)
    for hotkey in ("one", "two", "three"):
        admin.register(hotkey)
    admin.close()
    return path


def start(path, hotkey, blocks):
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(path), hotkey, str(blocks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_block(path, number):
    admin = Ledger(path)
    while admin.look()[0] < number:
        time.sleep(0.02)
    admin.close()


def test_two_processes_see_one_chain(path):
    wait_for_block(path, 1)
    nodes = [start(path, hotkey, 10) for hotkey in ("one", "two")]
    views = []
    for node in nodes:
        out, errors = node.communicate(timeout=60)
        assert node.returncode == 0, errors.decode()
        views.append(json.loads(out))
    one, two = views
    both = min(len(one["hashes"]), len(two["hashes"]))
    assert both >= 10
    assert one["hashes"][:both] == two["hashes"][:both]
    assert one["times"][:both] == two["times"][:both] == sorted(set(one["times"][:both]))
    for hotkey, view in zip(("one", "two"), views, strict=True):
        seen = view["seen"]
        assert seen == list(range(seen[0], seen[-1] + 1))
        included = [block for block, _ in view["made"]]
        assert len(included) > 3
        assert included == sorted(set(included)), "writes of one hotkey share a block or swapped places"
        archive = Ledger(path, archive=True)
        for block, n in view["made"]:
            assert archive.commitments(block)[hotkey].data == f"{hotkey} {n}"
            assert archive.commitments(block)[hotkey].block == block
        archive.close()


@pytest.mark.long
def test_a_process_killed_at_any_moment_harms_no_other(path):
    wait_for_block(path, 1)
    survivor = start(path, "one", 15)
    for delay in (0.0, 0.013, 0.05, 0.1, 0.2, 0.25):
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        victim.stdout.readline()
        time.sleep(delay)
        victim.kill()
        victim.communicate()
        assert victim.returncode == -signal.SIGKILL
    out, errors = survivor.communicate(timeout=60)
    assert survivor.returncode == 0, errors.decode()
    seen = json.loads(out)["seen"]
    assert seen == list(range(seen[0], seen[-1] + 1))
    admin = Ledger(path)
    assert admin._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert admin.metagraph().uid_of("two") == 1
    # Every call got its receipt, in the order in which the calls were made.
    wait_for_block(path, admin.look()[0] + 1)
    receipts = admin._db.execute("SELECT call, block FROM receipt ORDER BY call").fetchall()
    calls = admin._db.execute("SELECT id FROM call ORDER BY id").fetchall()
    assert [call for call, _ in receipts] == [call for (call,) in calls]
    assert [block for _, block in receipts] == sorted(block for _, block in receipts)
    admin.close()


def test_a_call_outlives_its_caller(path):
    wait_for_block(path, 1)
    code = """
import os, signal, sys
from tplr.chain.ledger import Ledger
Ledger(sys.argv[1]).submit("three", "commit", "last words")
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert dead.returncode == -signal.SIGKILL

    async def read():
        async with LocalChain(path, "one") as chain:
            async with aclosing(chain.blocks()) as blocks:
                await anext(blocks)
                await anext(blocks)
            return await chain.commitments(["three"])

    assert asyncio.run(read())["three"].data == "last words"
