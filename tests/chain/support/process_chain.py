"""A ``LocalChain`` in a separate process, driven over standard input: ``Chain`` as one class, with JSON between them.

Run as a program, this file is that process.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bittensor_core import Keypair

from tplr import errors
from tplr.chain import hotkeys
from tplr.chain.base import Block, Commitment, Metagraph, Neuron
from tplr.chain.clocks import WallClock
from tplr.chain.local import LocalChain
from tplr.files import atomic_write


class SharedClock(WallClock):
    """Real time, set forward for all processes that share ``file``."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def now(self) -> float:
        return time.time() + self._ahead()

    def skip(self, seconds: float) -> None:
        atomic_write(self.file, str(self._ahead() + seconds).encode())

    def _ahead(self) -> float:
        return float(self.file.read_text()) if self.file.exists() else 0.0


class ProcessChain:
    """Implements ``Chain``; one call at a time is in flight."""

    def __init__(self, process: asyncio.subprocess.Process, keypair: Keypair, about: dict[str, Any]) -> None:
        self.genesis, self.netuid = about["genesis"], about["netuid"]
        self.hotkey, self.block_time = about["hotkey"], about["block_time"]
        self._process = process
        self._keypair = keypair
        self._asking = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path, hotkey: Keypair, *, clock: SharedClock, archive: bool) -> Self:
        from forked_python import interpreter  # the program does not have its folder

        pipe = asyncio.subprocess.PIPE
        command = [*interpreter(), __file__, str(path), hotkey.ss58_address, str(clock.file), str(int(archive))]
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        return cls(process, hotkey, json.loads(await process.stdout.readline()))

    async def head(self) -> int:
        return await self._ask("head")

    async def blocks(self) -> AsyncGenerator[int, None]:
        while True:
            yield await self._ask("next_block")

    async def block(self, number: int) -> Block:
        return Block(**await self._ask("block", number))

    async def metagraph(self, block: int | None = None) -> Metagraph:
        found = await self._ask("metagraph", block)
        return Metagraph(found["block"], tuple(Neuron(**neuron) for neuron in found["neurons"]))

    async def commitments(self, hotkeys: Collection[str], block: int | None = None) -> dict[str, Commitment]:
        found = await self._ask("commitments", list(hotkeys), block)
        return {hotkey: Commitment(**commitment) for hotkey, commitment in found.items()}

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        rows = await self._ask("weights", block)
        return {int(uid): {int(to): weight for to, weight in row.items()} for uid, row in rows.items()}

    async def max_weight(self) -> float:
        return await self._ask("max_weight")

    async def commit(self, data: str) -> int:
        return await self._ask("commit", data)

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        return await self._ask("set_weights", dict(weights))

    def sign(self, message: bytes) -> bytes:
        return hotkeys.sign(self._keypair, message)

    async def close(self) -> None:
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    async def _ask(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._asking:
            self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
            # Even if the caller is cancelled, its answer is read before the next request.
            line = await asyncio.shield(asyncio.ensure_future(self._process.stdout.readline()))
        answer = json.loads(line)
        if "error" not in answer:
            return answer["result"]
        kind, message, extra = answer["error"]
        raise getattr(errors, kind)(message, **extra)


async def _serve(path: str, hotkey: str, clock: str, archive: str) -> None:
    async with LocalChain(path, hotkey, clock=SharedClock(Path(clock)), archive=archive == "1") as chain:
        about = {"genesis": chain.genesis, "netuid": chain.netuid}
        _say(about | {"hotkey": chain.hotkey, "block_time": chain.block_time})
        blocks = chain.blocks()
        while line := await asyncio.to_thread(sys.stdin.readline):
            method, *arguments = json.loads(line)
            if method == "set_weights":
                arguments = [{int(uid): weight for uid, weight in arguments[0].items()}]
            try:
                result = await (anext(blocks) if method == "next_block" else getattr(chain, method)(*arguments))
            except errors.ChainError as error:
                extra = {
                    key: value for key, value in vars(error).items() if key in ("name", "retry_at", "fate_unknown")
                }
                _say({"error": [type(error).__name__, str(error), extra]})
                continue
            _say({"result": _plain(result)})


def _plain(result: Any) -> Any:
    match result:
        case Block() | Metagraph():
            return asdict(result)
        case dict():
            return {key: asdict(v) if isinstance(v, Commitment) else v for key, v in result.items()}
    return result


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
