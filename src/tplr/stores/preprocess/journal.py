"""The journal of a preparation, written after every shard; an interrupted preparation resumes from it."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tplr.errors import ConfigError
from tplr.files import atomic_write
from tplr.stores.detect import JOURNAL, REPORT
from tplr.stores.preprocess.records import RecordPosition
from tplr.stores.preprocess.sources import difference

LOCK = ".prepare.lock"  # in a folder that is being written


@dataclass
class Counts:
    """Numbers of records and tokens so far; ``skipped`` counts records by reason.

    Attributes:
        cut_tokens: tokens that ``max_seq_len`` or packing cut off.
    """

    read: int = 0
    used: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass
class Progress:
    """All records before ``place`` are written.

    Attributes:
        shards: the report's entry by relative path, in the order of writing.
    """

    place: RecordPosition = field(default_factory=RecordPosition)
    counts: Counts = field(default_factory=Counts)
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        counts = {**vars(self.counts), "skipped": dict(self.counts.skipped)}
        return {"place": list(self.place), "counts": counts, "shards": self.shards}

    @classmethod
    def of(cls, value: dict[str, Any]) -> Self:
        """From ``to_dict``."""
        counts = value["counts"]
        return cls(
            RecordPosition(*value["place"]),
            Counts(**{**counts, "skipped": Counter(counts["skipped"])}),
            value["shards"],
        )


class Journal:
    """The journal and, in the end, the report of one output folder.

    Args:
        identity: everything that determines the output: ``config``, ``tokenizer`` and ``sources``.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder = folder
        self._identity = identity

    def finished(self) -> Progress | None:
        """Return the report's progress; None without a report. Raises ConfigError if the folder holds other output."""
        if progress := self._read(REPORT):
            (self._folder / JOURNAL).unlink(missing_ok=True)  # left by a process killed between writing and removing
        return progress

    def begin(self) -> Progress:
        """Return the saved progress, or a new one. No other process may write the folder, and there must be no report.

        Raises:
            ConfigError: the folder holds something else.
        """
        progress = self._read(JOURNAL)
        # Besides the lock, a process that was killed while it wrote its first journal leaves a draft of it.
        ours = (LOCK, f"{JOURNAL}.*.tmp")
        if progress is None and not all(any(map(path.match, ours)) for path in self._folder.iterdir()):
            raise ConfigError(f"{self._folder} is not empty and has no unfinished preparation: choose another folder")
        self._remove_drafts()
        if progress is None:
            progress = Progress()
            self.save(progress)
        return progress

    def _read(self, name: str) -> Progress | None:
        path = self._folder / name
        if not path.exists():
            return None
        try:
            value = json.loads(path.read_text())
            problem = self._problem(value)
            progress = None if problem else Progress.of(value["progress"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not of a preparation, or is damaged ({error!r}): choose another folder, or remove it"
            ) from error
        if problem:
            raise ConfigError(
                f"{self._folder} holds another preparation: {problem}; choose another folder, or remove it"
            )
        return progress

    def _problem(self, value: dict[str, Any]) -> str | None:
        """Return how the identity in a journal or report differs from this one; None if it does not."""
        if "sources" not in value:
            return "an earlier version created it without hashes of its sources"
        for name in ("config", "tokenizer"):
            if value[name] != self._identity[name]:
                return f"its {name} differs"
        return difference(value["sources"], self._identity["sources"])

    def _remove_drafts(self) -> None:
        """Remove the drafts of processes that were killed while writing."""
        for draft in self._folder.glob("*/.shard_*.tmp"):
            shutil.rmtree(draft, ignore_errors=True)
        for name in (REPORT, JOURNAL):
            for draft in self._folder.glob(f"{name}.*.tmp"):
                draft.unlink(missing_ok=True)

    def save(self, progress: Progress) -> None:
        """Write the position to resume from."""
        self._write(JOURNAL, progress)

    def finish(self, progress: Progress) -> None:
        """Write the report and remove the journal."""
        self._write(REPORT, progress)
        (self._folder / JOURNAL).unlink(missing_ok=True)

    def _write(self, name: str, progress: Progress) -> None:
        value = {**self._identity, "progress": progress.to_dict()}
        atomic_write(self._folder / name, json.dumps(value, indent=1).encode())
