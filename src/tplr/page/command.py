"""``tplr page``: reads a run, writes its page, and updates it while the run lasts."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tplr.chain.connect import LOCAL_PREFIX
from tplr.errors import ChainError, ConfigError, StoreError, TplrError
from tplr.files import atomic_write, check_outputs
from tplr.keys import page_document_key, page_key
from tplr.logging import logger, setup_logging
from tplr.node.arguments import Arguments
from tplr.node.audit_stamps import read_stamps
from tplr.node.network_reader import NetworkReader, Surroundings, open_network, this_environment
from tplr.node.score_evidence import ScoreEvidence
from tplr.page.assemble import assemble
from tplr.page.document import Run, RunDocument
from tplr.page.evaluations import figures
from tplr.page.history import History
from tplr.page.own_events import OwnEvents
from tplr.page.published import PublishedRun
from tplr.page.read_windows import ReadWindows
from tplr.page.render import render, to_json
from tplr.run.results import read_results
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry
from tplr.training.model import meta_model
from tplr.training.schemes import payload_spec

WRITTEN, FAILED = 0, 2
# Nodes may publish the reports of a window some windows later, so each update reads the newest windows again.
UNSETTLED_WINDOWS = 8
PUBLISH_SECONDS = 60.0


@dataclass(frozen=True)
class PageRequest:
    """The arguments of ``tplr page``.

    Attributes:
        out: the HTML file to write.
        json: file for the JSON document, or None.
        history: file that keeps records after buckets delete them, or None.
        validator: uid of the validator whose score reports are shown; None: the leading validator.
        results: folder with the operator's own evaluations (``tplr eval``), or None.
        events: event files of the operator's nodes.
        audits: file with stamps of ``tplr audit --record``, or None.
        follow: write the page again after each window, until the process is stopped.
        publish: upload the page to the page bucket.
    """

    network: Arguments
    out: Path
    json: Path | None = None
    history: Path | None = None
    validator: int | None = None
    events: tuple[Path, ...] = ()
    audits: Path | None = None
    results: Path | None = None
    follow: bool = False
    publish: bool = False


def main(request: PageRequest, surroundings: Surroundings | None = None) -> int:
    """Run ``tplr page``, in this process's environment or in ``surroundings``; returns the exit status."""
    setup_logging(debug=request.network.debug)
    try:
        asyncio.run(make_page(request, surroundings or this_environment))
    except (TplrError, OSError) as error:
        logger.error("%s", error)
        return FAILED
    print(request.out)  # noqa: T201 - the path is what the command gives
    return WRITTEN


async def make_page(request: PageRequest, surroundings: Surroundings) -> None:
    """Write the page once, or with ``follow`` again after each window.

    Raises:
        ConfigError: arguments or environment are wrong, a file can't be written, or the run has not started.
        ChainError, StoreError: the run can't be read; with ``follow``, only the first time.
        OSError: a file can't be written.
    """
    outputs = {"--out": request.out, "--json": request.json, "--history": request.history}
    await asyncio.to_thread(check_outputs, outputs)
    if request.follow:
        await asyncio.to_thread(_warn_of_missing_inputs, request)
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(surroundings())
        network = await stack.enter_async_context(open_network(request.network, environment))
        maker = await PageMaker.open(request, network)
        await maker.write()
        while request.follow:
            await asyncio.sleep(network.hparams.blocks_per_window * network.comms.chain.block_time)
            try:
                await network.comms.refresh()
                await maker.write()
            except (ChainError, StoreError) as error:
                logger.warning("page not updated: %s", error)


def _warn_of_missing_inputs(request: PageRequest) -> None:
    """Name each input that does not exist yet: its path may be mistyped."""
    inputs = [("--read-events", path) for path in request.events]
    inputs += [("--audits", request.audits), ("--results", request.results)]
    for name, path in inputs:
        if path and not path.exists():
            logger.warning("%s %s does not exist: the page lacks it until it is created; check the path", name, path)


class PageMaker:
    """Writes the page of one run repeatedly, and keeps the records that it has read."""

    def __init__(self, request: PageRequest, network: NetworkReader, history: History, start_window: int) -> None:
        self._request = request
        self._hparams = network.hparams
        self._comms = network.comms
        self._evidence = ScoreEvidence(network.comms, network.hparams)
        self._store = (
            network.connections.store(network.environment.bucket("page", "write")) if request.publish else None
        )
        self._history = history
        self._read = ReadWindows(UNSETTLED_WINDOWS)
        self._refused: dict[tuple[int, int], str] = {}
        self._events = OwnEvents(request.events)
        self._start_window = start_window
        self._spec = payload_spec(network.hparams)
        self._parameters = sum(one.numel() for one in meta_model(network.hparams).parameters())

    @classmethod
    async def open(cls, request: PageRequest, network: NetworkReader) -> "PageMaker":
        """Read the history.

        Raises:
            ConfigError: the run has not started, no page bucket is configured, or the request's uid is no validator.
        """
        start = await network.start_window()
        validators = network.comms.validators()
        if request.validator not in (None, *validators):
            raise ConfigError(
                f"--validator {request.validator}: no validator; those with a permit and a bucket on chain are uids "
                f"{validators}"
            )
        run = f"netuid {network.comms.chain.netuid}, version {network.hparams.version}, start window {start}"
        history = await asyncio.to_thread(History, run, request.history)
        return await asyncio.to_thread(cls, request, network, history, start)

    async def write(self) -> None:
        """Read new records, and write the page."""
        validator = self._validator()
        published = PublishedRun(self._comms, self._hparams, self._spec, validator, self._evidence)
        windows, scored = await published.windows(), await published.scored()
        wanted = self._read.wanted(windows, self._history.windows, validator=validator, scored=scored)
        records, checkpoints = await published.records(wanted), await published.checkpoints()
        self._read.note(wanted, unanswered=published.unanswered, validator=validator, scored=scored)
        known = {(one.window, one.uid) for one in self._history.evaluations.values() if one.uid is not None}
        evaluations = await published.evaluations(known, self._refused)
        await asyncio.to_thread(self._history.add, records, checkpoints, evaluations)
        document, page = await asyncio.to_thread(self._make, self._run(validator))
        if self._store:
            await _put(self._store, page_key(self._hparams.version), page, "text/html; charset=utf-8")
            key = page_document_key(self._hparams.version)
            await _put(self._store, key, to_json(document), "application/json")
        newest = document.windows.first + document.windows.count - 1
        logger.info("%s: windows %d to %d, %d bytes", self._request.out, document.windows.first, newest, len(page))

    def _validator(self) -> int | None:
        return self._comms.highest_stake_validator() if self._request.validator is None else self._request.validator

    def _make(self, run: Run) -> tuple[RunDocument, bytes]:
        """Assemble and write the document and the page. Blocks."""
        request = self._request
        results = read_results(request.results) if request.results else ()
        own = [one for result in results for one in figures(result, None)]
        document = assemble(
            run,
            self._history.windows,
            self._history.checkpoints.values(),
            self._comms.metagraph.neurons,
            evaluations=[*self._history.evaluations.values(), *own],
            events=self._events.read(),
            audits=read_stamps(request.audits) if request.audits and request.audits.exists() else (),
        )
        page = render(document)
        atomic_write(request.out, page)
        if request.json:
            atomic_write(request.json, to_json(document))
        return document, page

    def _run(self, validator: int | None) -> Run:
        hparams, chain, network = self._hparams, self._comms.chain, self._request.network.network
        return Run(
            network="localnet" if network.startswith(LOCAL_PREFIX) else network,
            netuid=chain.netuid,
            version=hparams.version,
            profile=hparams.profile,
            scheme=hparams.outer,
            model_type=hparams.model.model_type,
            parameters=self._parameters,
            validator=validator,
            start_window=self._start_window,
            block=self._comms.metagraph.block,
            window_seconds=hparams.blocks_per_window * chain.block_time,
            pay_windows=hparams.pay_windows,
            sequence_length=hparams.sequence_length,
        )


async def _put(store: ObjectStore, key: str, body: bytes, content_type: str) -> None:
    await with_retry(lambda: store.put(key, body, content_type=content_type), deadline_seconds=PUBLISH_SECONDS)
