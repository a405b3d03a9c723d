"""The document of a run: all that its page shows, as one typed JSON value (``docs/page.md``).

Columns have an entry for each window, from ``windows.first`` on; None is "not known". Whatever strangers wrote is text
in it, of bounded length, and never markup.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tplr.node.audit_stamps import AuditStamp

FORMAT = 1

# What became of a miner's update in a window: a character of ``Miner.outcomes`` → the words for it. The names of
# reasons are those of ``schemas.Reason``.
OUTCOMES = {
    " ": "not known: no included set could be read",
    ".": "not on the peer list",
    "i": "included",
    "p": "on probation: measured, not applied",
    "n": "no_bucket: the chain names no bucket of it",
    "m": "missing: no update when the time bound passed",
    "c": "no_commit: no hash was published before the window ended",
    "e": "too_early: uploaded before the window ended",
    "l": "too_late: uploaded after the time bound",
    "w": "wrong_size: not the size of an update",
    "h": "hash_mismatch: other bytes than the committed hash says",
    "f": "malformed: not an update",
    "z": "empty: every value is zero",
    "d": "denied: its bucket refused the key that is on chain",
    "x": "excluded: struck, or earns nothing; the next peer list is without it",
    "u": "unavailable: its bucket did not answer; perhaps not its fault",
}
OUTCOME_OF_REASON = {text.partition(":")[0]: mark for mark, text in OUTCOMES.items()}

# Whether a node held the network's model after a window: a character of ``Node.models`` → the words for it.
MODELS = {
    ".": "no report could be read",
    "=": "the model that most nodes report",
    "x": "another model than most nodes report",
}

Marks = Annotated[str, Field(description="one character for each window")]
Column = tuple[float | None, ...]


class Record(BaseModel):
    """Base of all parts: frozen, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Record):
    """What the run is.

    Attributes:
        network: the chain: a network's name, or ``localnet``.
        validator: uid of the validator whose score reports were read; None if there is none.
        start_window: first window of the run.
        parameters: of the model.
        block: of the chain, at which all this was read last.
        window_seconds: expected length of a window.
        pay_windows: pay follows from the evidence of so many last windows.
        sequence_length: in tokens.
    """

    network: str
    netuid: int
    version: str
    profile: str
    scheme: str
    model_type: str
    parameters: int
    validator: int | None
    start_window: int
    block: int
    window_seconds: float
    pay_windows: int
    sequence_length: int


class Windows(Record):
    """The windows that columns are about.

    Attributes:
        starts: time of each window's first block, unix seconds.
        tokens: that the included updates were trained on, as their headers say; None if a header was not readable.
        sealed: window → why its scores could not be read.
    """

    first: int
    count: int
    starts: Column
    tokens: tuple[int | None, ...]
    sealed: dict[int, str]


class Node(Record):
    """A miner or validator.

    Attributes:
        name: in a localnet, or as the file of its events is called; else empty.
        stake: on chain, in alpha.
        models: of ``MODELS``.
    """

    uid: int
    role: Literal["miner", "validator"]
    name: str
    hotkey: str
    stake: float
    models: Marks


class Miner(Record):
    """A miner's columns.

    Attributes:
        outcomes: of ``OUTCOMES``.
        pay: share of the pay that follows from the validator's evidence up to this window: its weight.
        credit: gain beyond chance that is the miner's own; under the documented rules, the rating's ordinal.
        training_loss: on the pages that it trained on, nats a token; from its own events.
        utilisation: share of the window in which it trained; from its own events.
        phases: seconds of the run in each of ``Time.phases``; empty without its events.
    """

    uid: int
    outcomes: Marks
    pay: Column
    credit: Column
    training_loss: Column = ()
    utilisation: Column = ()
    phases: tuple[float, ...] = ()


class Losses(Record):
    """Losses in nats a token, each of the model as it was before the window's step.

    Attributes:
        held_out: on random pages, which nobody could know before.
        assigned: on pages that miners were given, mean over the miners whose losses were measured.
    """

    held_out: Column
    assigned: Column


class Evaluation(Record):
    """A figure of the model that has applied ``window``, by whoever evaluated it: a validator's uid, or None for the
    page's maker."""

    window: int
    task: str
    metric: str
    value: float
    error: float | None
    uid: int | None


class Disagreement(Record):
    """A window after which nodes reported different models: fingerprint → uids."""

    window: int
    models: dict[str, tuple[int, ...]]


class Agreement(Record):
    """``fingerprints``: that of most nodes after each window, its first 12 digits."""

    fingerprints: tuple[str | None, ...]
    disagreements: tuple[Disagreement, ...]


class Strike(Record):
    """A rule that struck a miner in a window, and what the rule says."""

    window: int
    uid: int
    rule: str
    meaning: str


class Payment(Record):
    """Weights that the validator set on chain, as the chain has them: uid → share."""

    block: int
    window: int
    weights: dict[int, float]


class Checkpoint(Record):
    """A published snapshot of the model before ``window``. ``kept``: whether it is still there."""

    window: int
    uid: int
    bytes: int
    kept: bool


class Elector(Record):
    """A validator that votes: its share of the electors' stake, and its votes by window.

    ``votes``: ``y`` committed to what was decided, ``n`` to something else, ``.`` no commitment was readable.
    """

    uid: int
    stake: float
    votes: Marks


class Elections(Record):
    """Elections of included sets. ``decided``: ``c`` a set, ``v`` void, ``.`` nothing that could be read."""

    electors: tuple[Elector, ...]
    decided: Marks


class Time(Record):
    """Where the miners' time went: mean share of each phase in each window; from nodes' events."""

    phases: tuple[str, ...]
    shares: tuple[Column, ...]


class Numbers(Record):
    """A column of numbers as they are printed, or the same column as another one.

    Attributes:
        deltas: each number, as an integer of its last decimal, less the one before it.
        same: template and place of the column that this one equals; ``deltas`` is empty.
    """

    deltas: tuple[int, ...] = ()
    same: tuple[int, int] | None = None


class Template(Record):
    """A sentence without its numbers.

    Attributes:
        name: index of the row's name.
        parts: the text before, between and after the numbers.
        decimals: of each number.
        numbers: a column for each number, over the cells with this sentence, miner by miner and window by window.
    """

    name: int
    parts: tuple[str, ...]
    decimals: tuple[int, ...]
    numbers: tuple[Numbers, ...]


class Explanations(Record):
    """What ``tplr explain`` says of each miner in each window, packed by ``sentences.pack``.

    Attributes:
        names: of rows.
        shapes: lists of templates, the rows of a cell.
        cells: uid → the shape of each window's cell; -1: there is nothing.
    """

    names: tuple[str, ...]
    templates: tuple[Template, ...]
    shapes: tuple[tuple[int, ...], ...]
    cells: dict[int, tuple[int, ...]]


class RunDocument(Record):
    """The whole document.

    Attributes:
        outcomes, models: the words for the characters of ``Miner.outcomes`` and ``Node.models``.
        audits: of whom this page's maker has a stamp (``node/audit_stamps.py``).
        time: None without events.
        elections: None where nobody votes.
    """

    format: Literal[1] = FORMAT
    outcomes: dict[str, str] = OUTCOMES
    models: dict[str, str] = MODELS
    run: Run
    windows: Windows
    nodes: tuple[Node, ...]
    miners: tuple[Miner, ...]
    losses: Losses
    evaluations: tuple[Evaluation, ...] = ()
    agreement: Agreement
    strikes: tuple[Strike, ...]
    payments: tuple[Payment, ...]
    checkpoints: tuple[Checkpoint, ...]
    audits: tuple[AuditStamp, ...] = ()
    elections: Elections | None = None
    time: Time | None = None
    explanations: Explanations
