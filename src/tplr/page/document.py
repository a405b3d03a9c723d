"""The document of a run: the full content of its page, as one typed JSON value (``docs/page.md``).

Columns have an entry for each window, from ``windows.first`` on; None is "not known". Text from other nodes is bounded
in length and is never interpreted as markup.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tplr.node.audit_stamps import AuditStamp

FORMAT = 2

OTHER_OWNER = "-"
# Outcome of a miner's update in a window: character of ``Miner.outcomes`` → text. The reason names are those of
# ``schemas.Reason``.
OUTCOMES = {
    " ": "unknown: no included set could be read",
    ".": "not on the peer list",
    "i": "included",
    "p": "on probation: measured, not applied",
    "n": "no_bucket: it has no bucket on chain",
    "m": "missing: no update by the end of the time bound",
    "c": "no_commit: no hash was published before the window ended",
    "e": "too_early: uploaded before the window ended",
    "l": "too_late: uploaded after the time bound",
    "w": "wrong_size: not the size of an update",
    "h": "hash_mismatch: its bytes do not match the committed hash",
    "f": "malformed: not a valid update",
    "z": "empty: every value is zero",
    "d": "denied: its bucket refused the key that is on chain",
    "x": "excluded: it broke a rule or earns nothing, and leaves the next peer list",
    "u": "unavailable: its bucket did not answer, possibly not its fault",
    OTHER_OWNER: "its uid had another owner",
}
OUTCOME_OF_REASON = {text.partition(":")[0]: mark for mark, text in OUTCOMES.items()}

# A node's model after a window, compared with the network's: character of ``Node.models`` → text.
MODELS = {
    ".": "no report could be read",
    "=": "the model that most nodes report",
    "x": "another model than most nodes report",
    OTHER_OWNER: "its uid had another owner",
}

Marks = Annotated[str, Field(description="one character for each window")]
Column = tuple[float | None, ...]


class Record(BaseModel):
    """Base class of all document parts: frozen, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Record):
    """The run and its constants.

    Attributes:
        network: name of the chain's network, or ``localnet``.
        validator: uid of the validator whose score reports were read; None if there is none.
        start_window: first window of the run.
        parameters: number of the model's parameters.
        block: chain block of the last read.
        window_seconds: expected length of a window.
        pay_windows: number of last windows whose evidence determines the pay.
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
    """The windows of all columns.

    Attributes:
        starts: time of each window's first block, unix seconds.
        tokens: number of tokens that the included updates were trained on, from their headers; None if no header was
            readable.
        sealed: window → reason why its scores could not be read.
    """

    first: int
    count: int
    starts: Column
    tokens: tuple[int | None, ...]
    sealed: dict[int, str]


class Node(Record):
    """A miner or validator: a hotkey while it had a uid. A uid that changed hands is several nodes, in their order.

    Attributes:
        name: name of its event file without the suffix; empty without events.
        hotkey: empty if it is not known.
        stake: on chain now, in alpha; 0 if the uid has another owner now.
        models: column of ``MODELS`` characters.
    """

    uid: int
    role: Literal["miner", "validator"]
    name: str
    hotkey: str
    stake: float
    models: Marks


class Miner(Record):
    """A miner's columns; ``uid`` and ``hotkey`` are those of its ``Node``.

    Attributes:
        outcomes: of ``OUTCOMES``.
        pay: share of the pay that follows from the validator's evidence up to this window: its weight.
        credit: gain beyond chance that is the miner's own; under the documented rules, the rating's ordinal.
        training_loss: on the pages that it trained on, nats a token; from its own events.
        utilisation: share of the window in which it trained; from its own events.
        phases: seconds of the run in each of ``Time.phases``; empty without its events.
    """

    uid: int
    hotkey: str
    outcomes: Marks
    pay: Column
    credit: Column
    training_loss: Column = ()
    utilisation: Column = ()
    phases: tuple[float, ...] = ()


class Losses(Record):
    """Losses of the model before each window's step, in nats per token.

    Attributes:
        held_out: on random pages that nobody could know in advance.
        assigned: on the miners' assigned pages, mean over the miners whose losses were measured.
    """

    held_out: Column
    assigned: Column


class Evaluation(Record):
    """A metric of the model that has applied ``window``. ``uid``: the evaluating validator; None: the page maker."""

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
    """Agreement of the nodes' models. ``fingerprints``: the majority's after each window, 12 digits."""

    fingerprints: tuple[str | None, ...]
    disagreements: tuple[Disagreement, ...]


class Strike(Record):
    """A rule that struck a miner in a window, and the rule's meaning."""

    window: int
    uid: int
    rule: str
    meaning: str


class Payment(Record):
    """Weights of the validator as stored on chain: uid → share."""

    block: int
    window: int
    weights: dict[int, float]


class Checkpoint(Record):
    """A published checkpoint of the model before ``window``. ``kept``: whether it still exists."""

    window: int
    uid: int
    bytes: int
    kept: bool


class Elector(Record):
    """A validator that votes: its last share of the electors' stake, and its votes by window.

    ``votes``: ``y`` committed to the decided value, ``n`` committed to another value, ``.`` no commitment was readable,
    ``-`` its uid had another owner.
    """

    uid: int
    hotkey: str
    stake: float
    votes: Marks


class Elections(Record):
    """Elections of included sets. ``decided``: ``c`` a set, ``v`` void, ``.`` no decision was readable."""

    electors: tuple[Elector, ...]
    decided: Marks


class Time(Record):
    """Mean share of the miners' time in each phase by window; from the nodes' events."""

    phases: tuple[str, ...]
    shares: tuple[Column, ...]


class Numbers(Record):
    """A column of printed numbers, or a reference to an equal column.

    Attributes:
        deltas: difference of each number to the previous one, in units of the last decimal.
        same: template and place of the equal column; ``deltas`` is then empty.
    """

    deltas: tuple[int, ...] = ()
    same: tuple[int, int] | None = None


class Template(Record):
    """A sentence without its numbers.

    Attributes:
        name: index of the row's name.
        parts: the text before, between and after the numbers.
        decimals: number of decimals of each number.
        numbers: a column for each number, over all cells with this sentence, ordered by miner, then window.
    """

    name: int
    parts: tuple[str, ...]
    decimals: tuple[int, ...]
    numbers: tuple[Numbers, ...]


class Explanations(Record):
    """The output of ``tplr explain`` for each miner and window, packed by ``sentences.pack``.

    Attributes:
        names: names of rows.
        shapes: lists of templates; each list is the rows of a cell.
        cells: uid → shape of each window's cell, which is about the uid's owner in that window; -1: no explanation.
    """

    names: tuple[str, ...]
    templates: tuple[Template, ...]
    shapes: tuple[tuple[int, ...], ...]
    cells: dict[int, tuple[int, ...]]


class RunDocument(Record):
    """The whole document.

    Attributes:
        outcomes, models: the texts for the characters of ``Miner.outcomes`` and ``Node.models``.
        audits: the page maker's audit stamps (``node/audit_stamps.py``).
        time: None without events.
        elections: None if no elector is known.
    """

    format: Literal[2] = FORMAT
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
