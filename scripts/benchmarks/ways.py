"""Traces data through the code: the functions that an update, a page, one PUT, one GET and a variable pass.

    python scripts/benchmarks/ways.py [--list] [--only page]

A profiler records every call from one function of ``tplr`` to another, also across threads and tasks. Frames of
comprehensions count as their function; libraries are not counted.

- PUT, GET and variable: all functions that run. The S3 server is not counted; the variable ends at a HEAD's response.
- Gradient and page: functions that take or return the data, and the calls between two of them. PUT and GET are left
  out, and so are a node's other tasks: measuring, reporting, saving.

Two kinds of these calls are counted separately: calls into another file, and calls that pass on an argument of the
caller ("passed on"). Nested functions, such as closures, are counted, too. ``--list`` prints the calls, with ``*`` and
``=`` for the two kinds. ``docs/architecture.md`` has the table.
"""

import argparse
import asyncio
import dataclasses
import functools
import io
import os
import re
import sys
import tempfile
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

import tplr
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.config import Environment
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.localnet.dataset import SUBFOLDER, prepared_corpus, upload_dataset
from tplr.localnet.network import NETUID, Network, create_chain, lay_out
from tplr.localnet.plan import BLOCK_SECONDS, make_plan
from tplr.node.data_loader import WindowDataLoader
from tplr.node.miner import Miner
from tplr.node.replica import NodeContext, Replica
from tplr.node.sources import PageDataSource
from tplr.node.validator import Validator
from tplr.pages.dataset import PageDataset
from tplr.storage import S3Connections
from tplr.telemetry import Telemetry
from tplr.testing.s3server import Rules, serve
from tplr.training.model import build_model

ROOT = Path(tplr.__file__).parent
GRADIENT = ("comms", "compress/", "concurrency/", "exchange/gather", "exchange/updates", "node/miner", "node/replica")
GRADIENT += ("node/train_state", "node/windows", "training/")
# Measurements of a validator, and other published or saved data.
BESIDES = ("align", "baseline", "_begin_save", ":_bytes.", "batch_losses", "decode_bits", "decode_chunks", "evaluat")
BESIDES += ("fingerprint", "in_basis", "inner_products", "memory_by_kind", "OuterScheme.whole", "probe_gradient")
BESIDES += ("put_aggregate", "rank_batches", "report", "restore", "_row_losses", "set_caps", "state_dict")
BESIDES += ("tensor_norm", "token_losses", "TrainState._gradient.", "trial_step", "Update.norm", "witnessed")
# These run or not, depending on when the window is decided.
BESIDES += ("WindowUpdates._follow", "WindowUpdates.from_set")
PAGE = ("node/sources", "pages/", "tokenize/")
NO_S3 = ("testing/", "localnet/")


class Function(NamedTuple):
    """A function of ``tplr``: its file without suffix, and its qualified name."""

    file: str
    name: str


@functools.cache
def function_of(code: types.CodeType) -> Function | None:
    """Return the function with this code; None for libraries and modules."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or code.co_name == "<module>":
        return None
    name = re.sub(r"(\.<locals>)?\.<(genexpr|listcomp|dictcomp|setcomp)>", "", code.co_qualname)
    return Function(path.relative_to(ROOT).with_suffix("").as_posix(), name)


class Trace:
    """Records calls of functions of ``tplr`` during the ``with`` block; one trace at a time.

    Args:
        carries: returns whether a value contains the data; None: every function counts.
    """

    current: "Trace | None" = None

    def __init__(self, carries: Callable[[object], bool] | None = None) -> None:
        self._carries = carries or _is_data
        self._all = carries is None
        self._carrying: set[Function] = set()
        self._calls: dict[tuple[Function, Function], bool] = {}
        self._begun_by: dict[types.CodeType, Function] = {}

    def __enter__(self) -> "Trace":
        Trace.current = self
        sys.setprofile(profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        Trace.current = None

    def note(self, frame: types.FrameType, event: str, result: object) -> None:
        """Called by the profiler at each call and return."""
        if event not in ("call", "return") or (function := function_of(frame.f_code)) is None:
            return
        if event == "return":
            if function not in self._carrying and self._carries(result):
                self._carrying.add(function)
            return
        given = [one for one in _arguments(frame) if self._carries(one)]
        if given:
            self._carrying.add(function)
        above = _nearest(frame.f_back)
        caller = function_of(above.f_code) if above else self._begun_by.get(frame.f_code)
        if caller and caller != function:
            known = {id(one) for one in _arguments(above)} if above else set[int]()
            passed_on = any(id(one) in known for one in given)
            self._calls[caller, function] = self._calls.get((caller, function), False) or passed_on

    def begins(self, work: object) -> None:
        """Record that ``work`` will run in a thread or a task, in which no frame shows its caller."""
        caller = _nearest(sys._getframe(1))
        code = _code_of(work)
        if caller and code and (function := function_of(caller.f_code)):
            self._begun_by[code] = function

    def calls(self, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> dict[tuple[Function, Function], bool]:
        """Map each pair of caller and callee in files that begin with ``only`` to whether data were passed on."""
        return {
            pair: passed_on
            for pair, passed_on in self._calls.items()
            if (self._all or self._carrying.issuperset(pair))
            and all(not only or one.file.startswith(only) for one in pair)
            and not any(part in f"{one.file}:{one.name}." for part in without for one in pair)
        }


def profile(frame: types.FrameType, event: str, result: object, trace: type[Trace] = Trace) -> None:
    """Profile a call; threads may call this while the interpreter shuts down and globals are gone."""
    if trace.current:
        trace.current.note(frame, event, result)


def _arguments(frame: types.FrameType) -> list[object]:
    code, found = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [found[name] for name in names if name in found and name not in ("self", "cls")]


def _nearest(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame itself, or the first caller's frame, that belongs to a function of ``tplr``."""
    while frame is not None and function_of(frame.f_code) is None:
        frame = frame.f_back
    return frame


def _code_of(work: object) -> types.CodeType | None:
    """Return the code of the function of ``tplr`` behind a partial, a method or a coroutine."""
    match work:
        case functools.partial():
            return next(filter(None, map(_code_of, (work.func, *work.args))), None)
        case types.MethodType():
            return _code_of(work.__func__)
    code = getattr(work, "cr_code", None) or getattr(work, "__code__", None)
    return code if code is not None and function_of(code) else None


def follow_threads_and_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Report all started work to the current trace."""
    submit = ThreadPoolExecutor.submit

    def noted_submit(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        if Trace.current:
            Trace.current.begins(functools.partial(work, *args))
        return submit(pool, work, *args, **kwargs)

    def noted_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> Any:
        if Trace.current:
            Trace.current.begins(coroutine)
        return asyncio.Task(coroutine, loop=loop, **kwargs)

    ThreadPoolExecutor.submit = noted_submit
    loop.set_task_factory(noted_task)


def _is_data(value: object) -> bool:
    return value is not None and not isinstance(value, bool | int | float | str | type) and not callable(value)


def holds(is_data: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return whether a value is data, or a record or collection that contains data."""

    def found(value: object, depth: int = 4) -> bool:
        if is_data(value) or not depth:
            return is_data(value)
        if isinstance(value, dict):
            value = list(value.values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = [getattr(value, one.name, None) for one in dataclasses.fields(value)]
        return isinstance(value, list | tuple) and any(found(one, depth - 1) for one in value[:8])

    return found


def is_gradient(weights: set[int]) -> Callable[[object], bool]:
    """Return whether a value is a tensor other than weights and token ids, an update, or bytes that may be an
    update."""

    def is_data(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            tokens = value.dtype == torch.int64 and value.ndim == 2
            return value.ndim > 0 and not tokens and value.untyped_storage().data_ptr() not in weights
        if isinstance(value, np.ndarray):
            return value.dtype.kind == "f" and value.size > 64
        return isinstance(value, Update) or (isinstance(value, bytes | bytearray | memoryview) and len(value) > 400)

    return is_data


def is_page(value: object) -> bool:
    """Return whether a value is text, the bytes that contain text, or token ids."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value) > 100
    if isinstance(value, np.ndarray):
        return value.size > 20
    return isinstance(value, io.BytesIO | pa.Array | pa.RecordBatch | pa.ChunkedArray)


class Node(NamedTuple):
    """One node of a localnet, in this process."""

    replica: Replica
    data_loader: WindowDataLoader
    context: NodeContext
    source: PageDataSource


@asynccontextmanager
async def two_nodes(folder: Path, scheme: str) -> AsyncIterator[tuple[Node, Node, Any]]:
    """Open a miner and a validator on a chain file, an S3 server and real pages; also return the hparams."""
    options = {"miners": 1, "scheme": scheme, "vocab_size": 512}
    plan = make_plan(windows=8, run_dir=folder / "run", **options)
    corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    changes: dict[str, Any] = {"model": network.hparams.model.model_copy(update=tiny), "pages_per_window": 1}
    changes |= {"blocks_per_window": 12, "time_window_delta_seconds": 2, "manifest_timeout_seconds": 0.5}
    changes |= {"commit_margin_seconds": 0.5, "peer_list_window_margin": 1, "validator_offset": 1}
    hparams = network.hparams.model_copy(update=changes | {"probation_windows": 0})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(network.storage, network.keys))
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        create_chain(network, plan.seed)
        await asyncio.sleep(2 * BLOCK_SECONDS)  # until both registrations are in a block
        nodes = [await _node(name, network, hparams, server.endpoint, stack) for name in ("miner-1", "validator")]
        yield nodes[0], nodes[1], hparams


async def _node(name: str, network: Network, hparams: Any, endpoint: str, stack: AsyncExitStack) -> Node:
    setup = next(one for one in network.nodes if one.name == name)
    chain = await stack.enter_async_context(LocalChain(network.chain, setup.hotkey, netuid=NETUID))
    connections = await stack.enter_async_context(S3Connections(endpoint))
    comms = Comms(chain, hparams, connections, own_bucket=setup.account.writable, folder=network.folder / "states")
    await comms.try_commit(setup.account.readable)
    await comms.refresh()
    context = NodeContext(comms=comms, clock=comms.clock, telemetry=Telemetry(role=setup.role, uid=comms.uid))
    store = connections.store(network.dataset.readable)
    dataset = await PageDataset.open([store], SUBFOLDER, hparams.load_tokenizer(network.folder))
    replica = await stack.enter_async_context(Replica(build_model(hparams), hparams, context, network.folder / name))
    source = PageDataSource(dataset, hparams)
    return Node(replica, await stack.enter_async_context(WindowDataLoader(source, comms)), context, source)


async def gradient(scheme: str) -> dict[tuple[Function, Function], bool]:
    """Trace from a miner's loss to its bucket, and from there to the outer step."""
    with tempfile.TemporaryDirectory() as folder:
        async with two_nodes(Path(folder), scheme) as (miner, validator, hparams):
            models = [node.replica.train_state.parameters.values() for node in (miner, validator)]
            weights = {one.untyped_storage().data_ptr() for model in models for one in model}
            trace = Trace(holds(is_gradient(weights)))
            roles: list[Awaitable[None]] = [Miner(*miner[:3], hparams).run(), Validator(*validator[:3], hparams).run()]
            for node in (miner, validator):
                roles += [node.context.clock.run(), node.context.comms.run_refresh()]
            tasks = [asyncio.ensure_future(one) for one in roles]
            state = miner.replica.train_state
            try:
                await _until(lambda: state.global_step >= 1, tasks)
                with trace:
                    await _until(lambda: state.global_step >= 3, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return trace.calls(GRADIENT, BESIDES)


async def _until(condition: Callable[[], bool], tasks: Sequence[asyncio.Future[None]]) -> None:
    async with asyncio.timeout(900):
        while not condition():
            for ended in filter(asyncio.Future.done, tasks):
                ended.result()
            await asyncio.sleep(0.05)


async def page() -> dict[tuple[Function, Function], bool]:
    """Trace from parquet to a window's batches; footer and manifest are cached."""
    with tempfile.TemporaryDirectory() as folder:
        async with two_nodes(Path(folder), "demo") as (miner, _, _):
            await miner.source.batches(miner.source.assigned(1, 5, "0x" + "ab" * 32))
            with Trace(holds(is_page)) as trace:
                await miner.source.batches(miner.source.assigned(1, 9, "0x" + "ab" * 32))
    return trace.calls(PAGE)


async def requests(way: str) -> dict[tuple[Function, Function], bool]:
    """Trace one PUT, one GET, or a variable from the environment to the response of a HEAD."""
    account, data = new_account(), os.urandom(2**20)
    with tempfile.TemporaryDirectory() as folder:
        rules = Rules(one_write_per_second=False)
        serving = serve(Path(folder), key_table([account]), rules=rules)
        async with serving as server, S3Connections(server.endpoint) as connections:
            store = connections.store(account.writable)
            await store.put("first", data)
            with Trace() as trace:
                match way:
                    case "PUT":
                        await store.put("second", data, metadata={"name": "value"})
                    case "GET":
                        await store.get("first", max_bytes=len(data))
                    case _:
                        os.environ.update(bucket_variables("gradients", account, "read", "write"))
                        os.environ["TPLR_S3_ENDPOINT"] = server.endpoint
                        environment = Environment.read()
                        async with S3Connections.of(environment) as others:
                            await others.store(environment.bucket("gradients", "write")).head("first")
    calls = trace.calls()
    return {pair: same for pair, same in calls.items() if not any(one.file.startswith(NO_S3) for one in pair)}


def show(way: str, calls: dict[tuple[Function, Function], bool], *, listed: bool) -> None:
    files = {one.file for pair in calls for one in pair}
    into_another = sum(caller.file != called.file for caller, called in calls)
    nested = {one for pair in calls for one in pair if "<locals>" in one.name}
    counts = (len(files), len(calls), into_another, sum(calls.values()), len(nested))
    print(f"| {way} | {' | '.join(map(str, counts))} |", flush=True)
    for (caller, called), passed_on in sorted(calls.items()) if listed else ():
        marks = ("*" if caller.file != called.file else " ") + ("=" if passed_on else " ")
        print(f"  {marks} {caller.file}:{caller.name} -> {called.file}:{called.name}")


async def main(only: str, *, listed: bool) -> None:
    follow_threads_and_tasks(asyncio.get_running_loop())
    print("| way | files | calls | into another file | passed on | nested functions |\n|---|---|---|---|---|---|")
    for scheme in ("demo", "sparseloco"):
        if only in ("", "gradient", scheme):
            show(f"a gradient, scheme `{scheme}`", await gradient(scheme), listed=listed)
    if only in ("", "page"):
        show("a page", await page(), listed=listed)
    for way in ("PUT", "GET", "variable"):
        if only in ("", way):
            show(f"one {way}" if way != "variable" else "a variable", await requests(way), listed=listed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the calls of each way")
    parser.add_argument("--only", default="", help="gradient, demo, sparseloco, page, PUT, GET or variable")
    args = parser.parse_args()
    threading.setprofile(profile)  # before any thread starts
    asyncio.run(main(args.only, listed=args.list))
