"""``run.json``: what an exported folder holds, from which run and window; every value can be recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import FailFast, Field

from tplr.errors import ConfigError, PayloadError
from tplr.schemas import EvaluationResult, Items, Loss, Sealed, Sha256, Uid, UidText, Window, Wire
from tplr.untrusted import parse_untrusted

RECORD = "run.json"
MAX_HOTKEY = 128

Count = Annotated[int, Field(ge=0, lt=2**53)]


class WindowFacts(Wire):
    """What is published of a window.

    Attributes:
        fingerprint: of the model after it, by the leading validator's report; "" if the report is deleted.
        batches: that each included update was trained on, by uid, as its sender says; None where the update is deleted.
        held_out_loss: of the model before it, in nats per token, by the leading validator's score report; None if the
            report has none, or is not readable.
    """

    window: Window
    fingerprint: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    batches: Annotated[dict[UidText, Count | None], FailFast()] = Field(max_length=4096)
    held_out_loss: Loss | None


class Contributor(Wire):
    """A participant whose updates the model holds.

    Attributes:
        hotkey: as the leading validator's score reports name it, its first ``MAX_HOTKEY`` letters; "" if none does.
        windows: in which its update was included.
        tokens: that it trained on in those windows whose updates are not deleted.
        credit: its own part of its gain beyond chance, over the last ``pay_windows`` windows; None without a readable
            score report.
    """

    uid: Uid
    hotkey: Annotated[str, Field(max_length=MAX_HOTKEY)]
    windows: Count
    tokens: Count
    credit: Loss | None


class ExportRecord(Sealed):
    """The facts of an export.

    Attributes:
        tplr: version of this package that wrote it.
        version: of the run's rules, as in object names.
        window: the last one that the model has applied.
        global_step: outer steps applied.
        fingerprint: of the model after ``window``, as nodes report it.
        agreed: whether the leading validator's report of ``window`` was there to compare it with.
        digest: of the float32 weights, as nodes report it.
        dtype: of the files' tensors.
        dataset: SHA-256 of the dataset's manifest, or of the token store's.
        batch_tokens: tokens of a batch.
        credit_window: of the score report that credits come from; None without one.
        files: SHA-256 of every other file but the card, by its path.
        windows: those of which anything is published, ascending.
    """

    max_bytes: ClassVar[int] = 2**26

    format: Literal[1] = 1
    tplr: Annotated[str, Field(max_length=64)]
    version: Annotated[str, Field(max_length=64)]
    netuid: Count
    start_window: Window
    window: Window
    global_step: Count
    fingerprint: Sha256
    agreed: bool
    digest: Sha256
    dtype: Literal["float32", "bfloat16"]
    dataset: Sha256
    batch_tokens: Count
    credit_window: Window | None
    files: Annotated[dict[str, Sha256], FailFast()] = Field(max_length=100_000)
    windows: Items[WindowFacts] = Field(max_length=1_000_000)
    contributors: Items[Contributor] = Field(max_length=65536)
    evaluations: Items[EvaluationResult] = Field(max_length=1024)

    @property
    def tokens(self) -> int:
        """Tokens that the included updates were trained on, in windows whose updates are not deleted."""
        return sum(one.tokens for one in self.contributors)


def read_record(folder: Path) -> ExportRecord:
    """The record of an exported folder. Blocks.

    Raises:
        ConfigError: it is no folder of ``tplr export``.
        PayloadError: its record is damaged or was changed.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(f"{folder}: no {RECORD}, so it is no folder of tplr export")
    if path.stat().st_size > ExportRecord.max_bytes:
        raise PayloadError(f"{path}: {path.stat().st_size} bytes, expected at most {ExportRecord.max_bytes}")
    record = parse_untrusted(path.read_bytes(), ExportRecord, str(path))
    if record.seal != record.sealed().seal:
        raise PayloadError(f"{path}: its seal does not fit, the file is torn or was changed")
    return record
