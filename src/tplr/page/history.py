"""Keeps the records of each window in a file, because buckets delete objects that a page still shows."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from tplr.errors import ConfigError
from tplr.files import atomic_writer, sync_folder
from tplr.page.document import Checkpoint, Evaluation, Payment, Record
from tplr.page.sentences import Row


class MinerScore(Record):
    """A validator's score of one miner: share of the pay, credit, rules that struck, and the rows of
    ``scoring.explain``. ``loss``: the model's loss on the miner's assigned pages; None if it was not measured."""

    pay: float
    credit: float
    loss: float | None = None
    struck: tuple[str, ...]
    rows: tuple[Row, ...]


EMPTY = (None, {}, (), "")
SET = ("included", "skipped", "probation", "tokens", "decided")


class WindowRecord(Record):
    """All records that were read of one window.

    Attributes:
        start: time of its first block, unix seconds.
        included: uids; None if no included set could be read.
        skipped: uid → reason.
        probation: uids.
        tokens: number of tokens that the included updates were trained on.
        models: uid → fingerprint, and digest if there is one, that it reports of its model after the window.
        held_out, assigned: mean losses, as in ``document.Losses``.
        decided: a character of ``document.Elections``; empty if no decision is known.
        electors: share of the stake by uid.
        commitments: uid → whether it is committed to the decided value.
        hotkeys: uid → its owner at the window's end, for the uids of this record; without those that are not known.
        scores: by uid; without a report they are empty, and ``unread`` holds the reason.
    """

    window: int
    start: float | None = None
    included: tuple[int, ...] | None = None
    skipped: dict[int, str] = Field(default_factory=dict)
    probation: tuple[int, ...] = ()
    tokens: int | None = None
    models: dict[int, str] = Field(default_factory=dict)
    held_out: float | None = None
    assigned: float | None = None
    scores: dict[int, MinerScore] = Field(default_factory=dict)
    unread: str = ""
    payment: Payment | None = None
    decided: str = ""
    electors: dict[int, float] = Field(default_factory=dict)
    commitments: dict[int, bool] = Field(default_factory=dict)
    hotkeys: dict[int, str] = Field(default_factory=dict)

    @property
    def uids(self) -> set[int]:
        """All uids of this record."""
        named = (*(self.included or ()), *self.skipped, *self.probation, *self.models, *self.scores, *self.electors)
        return {*named, *self.commitments}

    def of_owners(self, owners: Mapping[int, str]) -> "WindowRecord":
        """Return this record without the uids that another hotkey had then; ``owners``: the present ones."""
        former = {uid for uid, hotkey in self.hotkeys.items() if owners.get(uid) != hotkey}
        if not former:
            return self
        named = ("skipped", "models", "scores", "electors", "commitments", "hotkeys")
        listed = ("probation",) if self.included is None else ("probation", "included")
        kept: dict[str, object] = {
            name: {uid: one for uid, one in getattr(self, name).items() if uid not in former} for name in named
        }
        kept |= {name: tuple(uid for uid in getattr(self, name) if uid not in former) for name in listed}
        return self.model_copy(update=kept)

    def completed_by(self, later: "WindowRecord") -> "WindowRecord":
        """Return this record updated with a later read; values that the later read lacks are kept.

        The included set is one fact of several fields (``SET``), which may be empty: they are all of one read, and not
        of an undecided one if another was decided.
        """
        known = {name: value for name in WindowRecord.model_fields if (value := getattr(later, name)) not in EMPTY}
        if self.included is not None or later.included is not None:
            newer = later.included is not None and (later.decided or not self.decided)
            known |= {name: getattr(later if newer else self, name) for name in SET}
        return self.model_copy(
            update=known
            | {
                "models": {**self.models, **later.models},
                "commitments": {**self.commitments, **later.commitments},
                "hotkeys": {**later.hotkeys, **self.hotkeys},  # the first ones are the chain's, if any are
                "unread": "" if self.scores or later.scores else later.unread,
            }
        )


_LINE = TypeAdapter(Annotated[WindowRecord | Checkpoint | Evaluation, Field(union_mode="left_to_right")])


K = TypeVar("K")
V = TypeVar("V")


def _replaced(place: dict[K, V], key: K, value: V) -> bool:
    """Set the value; return whether that changes anything."""
    same = place.get(key) == value
    place[key] = value
    return not same


class History:
    """Records by window, and all known checkpoints and evaluations. With a file, each change is appended as a line.

    Attributes:
        run: identifies the run.
        checkpoints: by window and uid.
        evaluations: by window, uid, task and metric.
    """

    def __init__(self, run: str, path: Path | None = None) -> None:
        """Read the file, if there is one; its last line may be incomplete. Blocks.

        Raises:
            ConfigError: the file is another run's, or no history.
        """
        self.run = run
        self.windows: dict[int, WindowRecord] = {}
        self.checkpoints: dict[tuple[int, int], Checkpoint] = {}
        self.evaluations: dict[tuple[int, int | None, str, str], Evaluation] = {}
        self._path = path
        if path and path.exists():
            self._load(path)
        if path:
            self._compact(path)

    def add(
        self,
        records: Iterable[WindowRecord],
        checkpoints: Iterable[Checkpoint],
        evaluations: Iterable[Evaluation] = (),
    ) -> None:
        """Add new records. Blocks. Raises OSError if the file can't be written."""
        found = [old.completed_by(one) if (old := self.windows.get(one.window)) else one for one in records]
        kept = {(one.window, one.uid): one for one in checkpoints}
        gone = [one.model_copy(update={"kept": False}) for key, one in self.checkpoints.items() if key not in kept]
        changed = [one for one in (*found, *kept.values(), *gone, *evaluations) if self._take(one)]
        if self._path and changed:
            with self._path.open("a") as file:
                file.writelines(f"{one.model_dump_json()}\n" for one in changed)
                file.flush()
                os.fsync(file.fileno())

    def _take(self, one: WindowRecord | Checkpoint | Evaluation) -> bool:
        """Store a record under its key; return whether that changes anything."""
        if isinstance(one, WindowRecord):
            return _replaced(self.windows, one.window, one)
        if isinstance(one, Checkpoint):
            return _replaced(self.checkpoints, (one.window, one.uid), one)
        return _replaced(self.evaluations, (one.window, one.uid, one.task, one.metric), one)

    def _load(self, path: Path) -> None:
        with path.open() as file:
            if file.readline() != self._header():
                raise ConfigError(f"{path}: not a history of this run ({self.run}): give another file with --history")
            for line in file:
                if not line.endswith("\n"):
                    break
                try:
                    one = _LINE.validate_json(line)
                except ValidationError as error:
                    raise ConfigError(f"{path}: a damaged line ({error.error_count()} problems): remove it") from None
                self._take(one)

    def _compact(self, path: Path) -> None:
        """Rewrite the file with each record once."""
        with atomic_writer(path) as file:
            file.write(self._header().encode())
            for one in (*self.windows.values(), *self.checkpoints.values(), *self.evaluations.values()):
                file.write(one.model_dump_json().encode() + b"\n")
        sync_folder(path.parent)

    def _header(self) -> str:
        return json.dumps({"history of": self.run}) + "\n"
