"""How far a preparation has come: written after every shard, so that an interrupted one goes on there."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tplr.errors import ConfigError
from tplr.files import atomic_write
from tplr.stores.detect import JOURNAL, REPORT
from tplr.stores.preprocess.records import RecordPosition


@dataclass
class Counts:
    """What became of the records and tokens so far; ``skipped`` counts by reason.

    Attributes:
        cut_tokens: cut off by ``max_seq_len`` or by packing.
    """

    read: int = 0
    used: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass
class Progress:
    """Everything written so far came from the records before ``place``.

    Attributes:
        shards: relative path, and what the report says of it, in the order of writing.
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
        identity: all that the output follows from.
        times: when the inputs changed last: an unfinished preparation does not go on with other bytes.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], times: Sequence[int]) -> None:
        self._folder = folder
        self._identities = {REPORT: _hash(identity), JOURNAL: _hash([identity, *times])}

    def open(self) -> tuple[Progress, bool]:
        """Where to go on, and whether that is the end.

        Raises:
            ConfigError: the folder holds something else.
        """
        for name in (REPORT, JOURNAL):
            path = self._folder / name
            if not path.exists():
                continue
            value = json.loads(path.read_text())
            if value["identity"] != self._identities[name]:
                raise ConfigError(
                    f"{self._folder} holds a preparation of other inputs, or by another config or tokenizer: "
                    "choose another folder, or remove it"
                )
            return Progress.of(value["progress"]), name == REPORT
        if self._folder.exists() and any(self._folder.iterdir()):
            raise ConfigError(f"{self._folder} is not empty, and no unfinished preparation: choose another folder")
        progress = Progress()
        self.save(progress)
        return progress, False

    def save(self, progress: Progress) -> None:
        """Go on from here, should this be the end."""
        self._write(JOURNAL, {"progress": progress.to_dict()})

    def finish(self, progress: Progress, config: dict[str, Any]) -> None:
        """Nothing is left to do: write the report."""
        self._write(REPORT, {"config": config, "progress": progress.to_dict()})
        (self._folder / JOURNAL).unlink(missing_ok=True)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        value = {**value, "identity": self._identities[name]}
        atomic_write(self._folder / name, json.dumps(value, indent=1).encode())


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
