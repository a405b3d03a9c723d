"""``tplr export --verify``: recomputes an exported folder from the run's buckets, and reports the differences."""

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tplr.errors import ConfigError
from tplr.hparams import HParams, load_hparams
from tplr.node.audit_scores import TOLERANCE
from tplr.node.network_reader import NetworkReader
from tplr.run.card import CARD, render_card
from tplr.run.evaluate import measure_held_out
from tplr.run.export import gather_facts
from tplr.run.folder import CONFIG, HPARAMS, file_hashes, load_model, write_settings
from tplr.run.record import RECORD, Contributor, ExportRecord, WindowFacts, read_record
from tplr.run.weights import INDEX, SINGLE_FILE, TORCH_DTYPES, weight_files
from tplr.run.window_model import window_model
from tplr.untrusted import printable

AGREES, DIFFERS = 0, 1
# Facts that never change; the others are compared window by window, or describe the files.
LASTING = (
    "version",
    "netuid",
    "start_window",
    "window",
    "global_step",
    "fingerprint",
    "digest",
    "dataset",
    "batch_tokens",
)
# Values in settings that depend on the exporter's machine, and not on the run.
LOCAL = ("transformers_version", "is_local", "local_files_only")


class Finding(NamedTuple):
    """A difference, or a fact that can't be checked any more."""

    differs: bool
    text: str


async def verify(network: NetworkReader, folder: Path, source: str, device: torch.device | str = "cpu") -> int:
    """Check files, weights, facts and card; prints each finding.

    Args:
        source: start of the replay, as in ``starting_point``.

    Returns:
        0 if everything that can be recomputed agrees, 1 if something differs.

    Raises:
        ConfigError: the folder is not from ``tplr export``, or belongs to another run.
        TplrError: the model or the facts can't be recomputed now.
    """
    record = await asyncio.to_thread(read_record, folder)
    if record.version != network.hparams.version:
        raise ConfigError(
            f"{folder}: of run {record.version}, this network's is {network.hparams.version}: give --hparams "
            f"{folder / HPARAMS}"
        )
    findings = await asyncio.to_thread(lambda: [*_files(folder, record)])
    if not findings:
        with tempfile.TemporaryDirectory(prefix="tplr-verify-") as scratch:
            async with window_model(network, source, record.window, Path(scratch), device=device) as model:
                facts = await gather_facts(network, model, record.dtype, record.files, None)
                findings += await asyncio.to_thread(lambda: [*_weights(folder, record, model.tensors)])
        findings += await asyncio.to_thread(lambda: [*_settings(network, folder, record)])
        findings += [*_facts(record, facts)]
        findings += await _evaluations(network, folder, record, device)
        findings += [*await asyncio.to_thread(_card, folder, record)]
    for finding in findings:
        print(f"{'DIFFERS' if finding.differs else 'NOT CHECKED'}: {printable(finding.text)}")  # noqa: T201
    if any(finding.differs for finding in findings):
        return DIFFERS
    print(f"AGREES: {folder}, window {record.window}: files, weights, facts and card")  # noqa: T201
    return AGREES


def _files(folder: Path, record: ExportRecord) -> Iterator[Finding]:
    found = file_hashes(folder)
    for name, sha256 in record.files.items():
        if name not in found:
            yield Finding(True, f"{name}: is missing, the folder is incomplete")
        elif found[name] != sha256:
            yield Finding(True, f"{name}: SHA-256 {found[name]}, {RECORD} says {sha256}")
    for name in sorted(found.keys() - record.files.keys() - {RECORD, CARD}):
        yield Finding(True, f"{name}: not named in {RECORD}")


def _weights(folder: Path, record: ExportRecord, tensors: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Compare the files' tensors with the recomputed ones, one by one."""
    place: dict[str, str] = {}  # by tensor: the name of its file
    try:
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    place[name] = path.name
                    wanted = tensors[name].detach().cpu().to(TORCH_DTYPES[record.dtype]) if name in tensors else None
                    if wanted is None or not torch.equal(file.get_tensor(name), wanted):
                        yield Finding(True, f"{path.name}: {name} is not the run's tensor after window {record.window}")
    except SafetensorError as error:
        yield Finding(True, f"{folder}: {error}")
    for name in sorted(tensors.keys() - place.keys()):
        yield Finding(True, f"{name}: no file holds it")
    yield from _index(folder, place)


def _index(folder: Path, place: Mapping[str, str]) -> Iterator[Finding]:
    """Check that a program that loads the folder reads each tensor from the file in which it was found."""
    names = set(place.values())
    if len(names) > 1 and SINGLE_FILE not in names:
        index = _json(folder / INDEX)
        if not isinstance(index, dict) or index.get("weight_map") != place:
            yield Finding(True, f"{INDEX}: does not name the file of each tensor")
        return
    for name in sorted((names | ({INDEX} if (folder / INDEX).exists() else set())) - {SINGLE_FILE}):
        yield Finding(True, f"{name}: expected {SINGLE_FILE} alone, or files with an index")


def _settings(network: NetworkReader, folder: Path, record: ExportRecord) -> Iterator[Finding]:
    """Compare every other file with the one that an export of this run writes here.

    Values that depend on the exporter's machine are left out. If its version of ``transformers`` is another one, it may
    have written other files for the same run.
    """
    if load_hparams(folder / HPARAMS) != network.hparams:
        yield Finding(True, f"{HPARAMS}: is not the run's")
    with tempfile.TemporaryDirectory(prefix="tplr-verify-") as scratch:
        own = Path(scratch)
        text, tokenizer = network.arguments.hparams.read_bytes(), network.tokenizer()
        write_settings(own, hparams=network.hparams, hparams_text=text, tokenizer=tokenizer, dtype=record.dtype)
        names = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
        same_version = _version(own) == _version(folder)
        for name in sorted(names - {HPARAMS}):
            if _comparable(own / name) != _comparable(folder / name):
                by = "" if same_version else f", but transformers {_version(folder)} wrote it, here is {_version(own)}"
                yield Finding(same_version, f"{name}: is not the run's{by}")
    known = names | {INDEX, *(path.name for path in weight_files(folder))}
    for name in sorted(record.files.keys() - known):
        yield Finding(True, f"{name}: is no file of an export")


def _version(folder: Path) -> str:
    config = _json(folder / CONFIG)
    return str(config.get("transformers_version"))[:40] if isinstance(config, dict) else "unknown"


def _comparable(path: Path) -> object:
    """Return the content of a file, of JSON without what depends on the exporter's machine; None without a file."""
    if not path.is_file():
        return None
    if path.suffix != ".json":
        return path.read_bytes()
    content = _json(path)
    return {name: one for name, one in content.items() if name not in LOCAL} if isinstance(content, dict) else content


def _json(path: Path) -> Any:
    """Return the content of a JSON file; None if it can't be parsed or does not exist."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _facts(record: ExportRecord, found: ExportRecord) -> Iterator[Finding]:
    for name in LASTING:
        yield from _compared(name, getattr(record, name), getattr(found, name))
    now = {one.window: one for one in found.windows}
    for one in record.windows:
        yield from _window(one, now.get(one.window))
    if found.windows == record.windows and found.credit_window == record.credit_window:
        for uid in sorted({one.uid for one in (*record.contributors, *found.contributors)}):
            claimed, computed = [[one for one in of.contributors if one.uid == uid] for of in (record, found)]
            yield from _contributor(f"contributor uid {uid}", claimed, computed)
    else:
        yield Finding(False, "contributors: some windows' reports or updates are deleted, or published since")


def _contributor(name: str, claimed: Sequence[Contributor], found: Sequence[Contributor]) -> Iterator[Finding]:
    """Compare the owners of a uid; if the hotkey of one is not known, only what all of them did together."""
    if all(one.hotkey for one in (*claimed, *found)):
        yield from _compared(name, claimed, found)
    elif claimed != found:
        sums = [(sum(one.windows for one in of), sum(one.tokens for one in of)) for of in (claimed, found)]
        yield from _compared(f"{name}: windows and tokens", *sums)
        known = max((one.credit for one in found if one.credit is not None), default=None)
        for one in claimed:
            if one.credit is not None and all(other.hotkey for other in found):
                yield from _compared(f"{name}: credit", one.credit, known)
        yield Finding(False, f"{name}: its hotkeys: the chain has dropped the state of some windows")


async def _evaluations(
    network: NetworkReader, folder: Path, record: ExportRecord, device: torch.device | str
) -> list[Finding]:
    """Measure the loss on held-out pages again; tasks are not repeated, because their data may not be available."""
    found: list[Finding] = []
    for result in record.evaluations:
        found += _compared(f"the model of {result.command}", result.digest, record.digest)
        if record.dtype == "float32":
            loaded = await asyncio.to_thread(load_model, folder, device)
            measured = await measure_held_out(network, loaded, record.window, result.precision)
            found += _compared(f"held-out pages of {result.command}", result.held_out.pages, measured.pages)
            if abs(measured.nats_per_token - result.held_out.nats_per_token) > TOLERANCE[result.precision]:
                found += _compared(f"held-out loss of {result.command}", result.held_out, measured)
        else:
            found.append(Finding(False, f"held-out loss, of weights that this folder has rounded: {result.command}"))
        if result.tasks:
            found.append(Finding(False, f"tasks {', '.join(sorted(result.tasks))}: run again {result.command}"))
    return found


def _window(claimed: WindowFacts, found: WindowFacts | None) -> Iterator[Finding]:
    name = f"window {claimed.window}"
    if found is None:
        yield Finding(False, f"{name}: its reports are deleted")
        return
    if claimed.fingerprint and found.fingerprint:
        yield from _compared(f"{name}: fingerprint", claimed.fingerprint, found.fingerprint)
    if claimed.held_out_loss is not None and found.held_out_loss is not None:
        yield from _compared(f"{name}: held-out loss", claimed.held_out_loss, found.held_out_loss)
    yield from _compared(f"{name}: included uids", sorted(claimed.batches), sorted(found.batches))
    for uid in sorted(claimed.batches.keys() & found.batches.keys()):
        if None not in (claimed.batches[uid], found.batches[uid]):
            yield from _compared(f"{name}: batches of uid {uid}", claimed.batches[uid], found.batches[uid])


def _card(folder: Path, record: ExportRecord) -> Iterator[Finding]:
    hparams: HParams = load_hparams(folder / HPARAMS)
    path = folder / CARD
    if not path.is_file() or path.read_bytes() != render_card(record, hparams).encode():
        yield Finding(True, f"{CARD}: is not the card of {RECORD}")


def _compared(name: str, claimed: object, found: object) -> Iterator[Finding]:
    if claimed != found:
        yield Finding(True, f"{name}: the folder says {claimed}, found {found}")
