"""Builds the document of a run from its window records: a pure function."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from tplr.chain import Neuron
from tplr.node.audit_stamps import AuditStamp
from tplr.node.window_time import PHASES
from tplr.page.document import (
    OTHER_OWNER,
    OUTCOME_OF_REASON,
    Agreement,
    Checkpoint,
    Column,
    Disagreement,
    Elections,
    Elector,
    Evaluation,
    Losses,
    Miner,
    Node,
    Payment,
    Run,
    RunDocument,
    Strike,
    Time,
    Windows,
)
from tplr.page.history import MinerScore, WindowRecord
from tplr.page.own_events import NodeEvents
from tplr.page.owners import Owners, OwnRecords, UidOwner
from tplr.page.sentences import pack
from tplr.scoring import penalties
from tplr.scoring.documented import penalties as documented_penalties

MEANINGS = {
    rule.code: rule.meaning for rules in (documented_penalties.BY_CODE, penalties.BY_CODE) for rule in rules.values()
}
# Decimals of the charts' numbers; sentences have more.
SHARE, LOSS = 4, 4
VOTES = {True: "y", False: "n", None: "."}  # by whether an elector is committed to the decided value


def assemble(
    run: Run,
    records: Mapping[int, WindowRecord],
    checkpoints: Iterable[Checkpoint],
    neurons: Iterable[Neuron],
    *,
    evaluations: Iterable[Evaluation] = (),
    events: Sequence[NodeEvents] = (),
    audits: Iterable[AuditStamp] = (),
) -> RunDocument:
    """Return the document of the windows from the first to the last of ``records``.

    Args:
        records: by window.
        neurons: all currently registered neurons.
        events: events of the page maker's own nodes.
    """
    first, last = (min(records), max(records)) if records else (run.start_window, run.start_window - 1)
    span = [records.get(window, WindowRecord(window=window)) for window in range(first, last + 1)]
    owners = Owners(span)
    known = {owners.newest(one.uid, one.windows): one for one in events if one.uid is not None}
    registered = {neuron.uid: neuron for neuron in neurons}
    majority = [_majority(one.models) for one in span]
    miners = owners.of(lambda one: (*(one.included or ()), *one.skipped, *one.probation, *one.scores))
    electors, reporting = owners.of(lambda one: one.electors), owners.of(lambda one: one.models)
    return RunDocument(
        run=run,
        windows=Windows(
            first=first,
            count=len(span),
            starts=tuple(one.start for one in span),
            tokens=tuple(one.tokens for one in span),
            sealed={one.window: one.unread for one in span if one.unread},
        ),
        nodes=tuple(
            _node(
                node,
                registered.get(node.uid),
                known.get(node),
                mines=node in miners,
                votes=node in electors,
                models=_models(node.uid, owners.records(node), majority),
            )
            for node in owners.in_order({*reporting, *miners})
        ),
        miners=tuple(_miner(node, owners.records(node), known.get(node)) for node in owners.in_order(miners)),
        losses=_losses(span, events),
        evaluations=tuple(sorted(evaluations, key=lambda one: (one.task, one.metric, one.window, one.uid or -1))),
        agreement=Agreement(
            fingerprints=tuple(majority), disagreements=tuple(_disagreements(span)) if reporting else ()
        ),
        strikes=tuple(_strikes(span)),
        payments=tuple(_payments(span)),
        checkpoints=tuple(sorted(checkpoints, key=lambda one: (one.window, one.uid))),
        audits=tuple(audits),
        time=_time(span, events),
        elections=_elections(span, owners),
        explanations=pack(
            {
                uid: [one.scores[uid].rows if uid in one.scores else None for one in span]
                for uid in {node.uid for node in miners}
            }
        ),
    )


def _elections(span: Sequence[WindowRecord], owners: Owners) -> Elections | None:
    stakes: dict[UidOwner, float] = {}
    for node in owners.of(lambda one: one.electors):
        known = (one.electors[node.uid] for one in reversed(owners.records(node)) if one and node.uid in one.electors)
        stakes[node] = round(next(known), SHARE)
    if not stakes:
        return None

    def votes(node: UidOwner) -> str:
        held = owners.records(node)
        return "".join(OTHER_OWNER if one is None else VOTES[one.commitments.get(node.uid)] for one in held)

    ranked = sorted(owners.in_order(stakes), key=lambda node: (-stakes[node], node.uid))
    return Elections(
        electors=tuple(
            Elector(uid=node.uid, hotkey=node.hotkey, stake=stakes[node], votes=votes(node)) for node in ranked
        ),
        decided="".join(one.decided or "." for one in span),
    )


def _majority(models: Mapping[int, str]) -> str | None:
    """Return the model that most nodes report; in a tie, the one whose text sorts first."""
    reported = sorted(models.values())
    return max(reported, key=reported.count, default=None)


def _models(uid: int, held: OwnRecords, majority: Sequence[str | None]) -> str:
    """Return a node's column of ``document.MODELS`` characters."""

    def mark(record: WindowRecord | None, most: str | None) -> str:
        if record is None:
            return OTHER_OWNER
        model = record.models.get(uid)
        return "." if model is None else "=" if model == most else "x"

    return "".join(map(mark, held, majority))


def _node(
    node: UidOwner, neuron: Neuron | None, events: NodeEvents | None, *, mines: bool, votes: bool, models: str
) -> Node:
    here = neuron if neuron and node.hotkey in ("", neuron.hotkey) else None
    return Node(
        uid=node.uid,
        role="validator" if not mines and (votes or (here and here.permit)) else "miner",
        name=events.name if events else "",
        hotkey=node.hotkey,
        stake=here.stake if here else 0.0,
        models=models,
    )


def _miner(node: UidOwner, held: OwnRecords, events: NodeEvents | None) -> Miner:
    losses = events.training_loss if events else {}
    seconds = [events.seconds.get(one.window, ()) if one else () for one in held] if events else []
    return Miner(
        uid=node.uid,
        hotkey=node.hotkey,
        outcomes="".join(_outcome(node.uid, one) for one in held),
        pay=_of_score(node.uid, held, lambda score: round(score.pay, SHARE)),
        credit=_of_score(node.uid, held, lambda score: round(score.credit, SHARE)),
        training_loss=tuple(_rounded(losses.get(one.window), LOSS) if one else None for one in held) if losses else (),
        utilisation=tuple(_share(one, "training") for one in seconds) if events and events.seconds else (),
        phases=tuple(round(sum(phase), 1) for phase in zip(*filter(None, seconds), strict=True)),
    )


def _of_score(uid: int, held: OwnRecords, what: Callable[[MinerScore], float]) -> Column:
    return tuple(what(one.scores[uid]) if one and uid in one.scores else None for one in held)


def _outcome(uid: int, record: WindowRecord | None) -> str:
    """Return the character of ``document.OUTCOMES`` for a miner in a window."""
    if record is None:
        return OTHER_OWNER
    if record.included is None:
        return " "
    if uid in record.included:
        return "i"
    if uid in record.skipped:
        return OUTCOME_OF_REASON[record.skipped[uid]]
    return "p" if uid in record.probation else "."


def _losses(span: Sequence[WindowRecord], events: Sequence[NodeEvents]) -> Losses:
    """Return the published losses; if a window has no held-out loss, use one of the page maker's own validators."""
    own = {window: loss for node in events if node.role == "validator" for window, loss in node.held_out.items()}
    held_out = [own.get(one.window) if one.held_out is None else one.held_out for one in span]
    return Losses(
        held_out=tuple(_rounded(loss, LOSS) for loss in held_out),
        assigned=tuple(_rounded(one.assigned, LOSS) for one in span),
    )


def _disagreements(span: Sequence[WindowRecord]) -> Iterable[Disagreement]:
    for one in span:
        if len(set(one.models.values())) > 1:
            uids: dict[str, list[int]] = {}
            for uid, model in sorted(one.models.items()):
                uids.setdefault(model, []).append(uid)
            yield Disagreement(window=one.window, models={model: tuple(held) for model, held in uids.items()})


def _strikes(span: Sequence[WindowRecord]) -> Iterable[Strike]:
    for one in span:
        for uid, score in sorted(one.scores.items()):
            for rule in score.struck:
                meaning = MEANINGS.get(rule, "no rule of this version")
                yield Strike(window=one.window, uid=uid, rule=rule, meaning=meaning)


def _payments(span: Sequence[WindowRecord]) -> Iterable[Payment]:
    """Return each setting of weights once, by block."""
    found = {one.payment.block: one.payment for one in span if one.payment}
    return (found[block] for block in sorted(found))


def _time(span: Sequence[WindowRecord], events: Sequence[NodeEvents]) -> Time | None:
    miners = [node for node in events if node.role == "miner" and node.seconds]
    if not miners:
        return None
    columns = []
    for phase in PHASES:
        shares = [[_share(node.seconds.get(one.window, ()), phase) for node in miners] for one in span]
        known = [[share for share in window if share is not None] for window in shares]
        columns.append(tuple(round(fmean(window), SHARE) if window else None for window in known))
    return Time(phases=PHASES, shares=tuple(columns))


def _share(seconds: Sequence[float], phase: str) -> float | None:
    return round(seconds[PHASES.index(phase)] / sum(seconds), 3) if sum(seconds) else None


def _rounded(value: float | None, decimals: int) -> float | None:
    return None if value is None else round(value, decimals)
