"""``tplr export``: a window's model as a folder, with a card whose figures can be recomputed."""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tplr.errors import ConfigError
from tplr.files import atomic_folder, atomic_write, check_outputs
from tplr.logging import logger
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import chosen_window, model_fingerprint
from tplr.run.card import CARD, render_card
from tplr.run.folder import file_hashes, model_layouts, write_model
from tplr.run.history import read_history
from tplr.run.record import RECORD, ExportRecord
from tplr.run.results import results_of
from tplr.run.weights import MAX_SHARD_BYTES, ExportDtype
from tplr.run.window_model import WindowModel, window_model
from tplr.training.fingerprint import digest
from tplr.training.schemes import payload_spec


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of an export.

    Attributes:
        window: a number, or ``latest``.
        source: start of the replay, as in ``starting_point``.
        results: folder with results of ``tplr eval``; those of the window are included.
    """

    window: str
    source: str
    out: Path
    dtype: ExportDtype
    results: Path | None
    max_shard_bytes: int = MAX_SHARD_BYTES


async def export(network: NetworkReader, request: ExportRequest, device: torch.device | str = "cpu") -> ExportRecord:
    """Write ``request.out``, which appears when it is complete.

    Raises:
        ConfigError: ``request.out`` exists or can't be written, or the window is not one of the run's.
        TplrError: the model is not available, or differs from the network's.
    """
    await asyncio.to_thread(check_new, request.out)
    window = await chosen_window(network, request.window, await network.start_window())
    with tempfile.TemporaryDirectory(prefix="tplr-export-") as scratch:
        async with window_model(network, request.source, window, Path(scratch), device=device) as model:
            return await _write(network, request, model)


def check_new(out: Path) -> None:
    """Raise ConfigError if ``out`` exists and is not an empty folder, or can't be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists already; give a new folder")
    check_outputs({"--out": out}, "folder")


async def gather_facts(
    network: NetworkReader, model: WindowModel, dtype: ExportDtype, files: Mapping[str, str], results: Path | None
) -> ExportRecord:
    """Return the record of an export from the current content of the run's buckets."""
    hparams, start = network.hparams, await network.start_window()
    history = await read_history(network, payload_spec(hparams), range(start, model.window + 1))
    source = await network.data_source()
    found = await model_fingerprint(network, model.tensors, model.window, step=model.global_step)
    weights = await asyncio.to_thread(digest, model.tensors)
    return ExportRecord(
        tplr=version("tplr"),
        version=hparams.version,
        netuid=network.arguments.netuid,
        start_window=start,
        window=model.window,
        global_step=model.global_step,
        fingerprint=found,
        agreed=model.fingerprint == found,
        digest=weights,
        dtype=dtype,
        dataset=source.sha256,
        batch_tokens=hparams.batch_size * hparams.sequence_length,
        credit_window=history.credit_window,
        files=dict(files),
        windows=history.windows,
        contributors=history.contributors,
        evaluations=tuple(await asyncio.to_thread(results_of, results, digest=weights) if results else ()),
    ).sealed()


async def _write(network: NetworkReader, request: ExportRequest, model: WindowModel) -> ExportRecord:
    hparams = network.hparams
    tokenizer = await asyncio.to_thread(network.tokenizer)
    text = await asyncio.to_thread(network.arguments.hparams.read_bytes)
    facts = await gather_facts(network, model, request.dtype, {}, request.results)

    def write() -> ExportRecord:
        with atomic_folder(request.out) as folder:
            write_model(
                folder,
                hparams=hparams,
                hparams_text=text,
                tokenizer=tokenizer,
                tensors=model.tensors,
                layouts=model_layouts(hparams),
                dtype=request.dtype,
                max_shard_bytes=request.max_shard_bytes,
            )
            record = facts.model_copy(update={"files": file_hashes(folder)}).sealed()
            atomic_write(folder / RECORD, record.model_dump_json(indent=1).encode())
            atomic_write(folder / CARD, render_card(record, hparams).encode())
        return record

    record = await asyncio.to_thread(write)
    logger.info("window %d of run %s exported to %s", record.window, record.version, request.out)
    return record
