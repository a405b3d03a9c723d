"""``run.json``: the content of an exported folder, its run and its window; every value can be recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import FailFast, Field

from tplr.errors import ConfigError, PayloadError
from tplr.node.uid_owners import MAX_HOTKEY
from tplr.schemas import EvaluationResult, Items, Loss, Sealed, Sha256, Uid, UidText, Window, Wire
from tplr.untrusted import parse_untrusted

RECORD = "run.json"

Count = Annotated[int, Field(ge=0, lt=2**53)]


class WindowFacts(Wire):
    """The published facts of a window.

    Attributes:
        fingerprint: the model's after the window, by most electors' reports; "" if they are deleted.
        batches: number of batches of each included update, by uid, as claimed by its sender; None if it is deleted.
        held_out_loss: loss of the model before the window, in nats per token, by the leading validator's score report;
            None if the report has none or is not readable.
    """

    window: Window
    fingerprint: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    batches: Annotated[dict[UidText, Count | None], FailFast()] = Field(max_length=4096)
    held_out_loss: Loss | None


class Contributor(Wire):
    """A participant whose updates are part of the model: a hotkey while it had a uid.

    Attributes:
        hotkey: that of the uid at the end of these windows, by the chain; if it has dropped the state of a window, by
            the leading validator's score report of it, its first ``MAX_HOTKEY`` letters; "" without one.
        windows: in which its update was included.
        tokens: that it trained on in those windows whose updates are not deleted.
        credit: its own part of its gain beyond chance, over the last ``pay_windows`` windows; None without a readable
            score report of this hotkey.
    """

    uid: Uid
    hotkey: Annotated[str, Field(max_length=MAX_HOTKEY)]
    windows: Count
    tokens: Count
    credit: Loss | None


class ExportRecord(Sealed):
    """The facts of an export.

    Attributes:
        tplr: version of the package that wrote it.
        version: version of the run's rules, as in object names.
        window: the last applied window.
        global_step: number of applied outer steps.
        fingerprint: the model's after ``window``, as in nodes' reports.
        agreed: whether electors with more than half of the stake report it for ``window``.
        digest: digest of the float32 weights, as in nodes' reports.
        dtype: type of the files' tensors.
        dataset: SHA-256 of the dataset's manifest, or of the token store's.
        batch_tokens: number of tokens of a batch.
        credit_window: window of the score report with the credits; None without one.
        files: SHA-256 of every other file except the card, by its path.
        windows: windows with any published record, ascending.
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
        """Number of tokens that the included updates were trained on, in windows whose updates are not deleted."""
        return sum(one.tokens for one in self.contributors)


def read_record(folder: Path) -> ExportRecord:
    """Read the record of an exported folder. Blocks.

    Raises:
        ConfigError: it is not a folder of ``tplr export``.
        PayloadError: its record is damaged or was changed.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(f"{folder}: no {RECORD}: not a folder of tplr export")
    if path.stat().st_size > ExportRecord.max_bytes:
        raise PayloadError(f"{path}: {path.stat().st_size} bytes, expected at most {ExportRecord.max_bytes}")
    record = parse_untrusted(path.read_bytes(), ExportRecord, str(path))
    if record.seal != record.sealed().seal:
        raise PayloadError(f"{path}: its seal does not match, the file is torn or was changed")
    return record
