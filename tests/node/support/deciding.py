"""Decisions in the form in which electors publish them."""

from collections.abc import Iterable

from tplr.comms import Comms
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.ballots import Commitment, Decision, Echo, Value, value_id
from tplr.exchange.envelope import sign_document
from tplr.keys import decision_key


async def publish_decision(nodes: Iterable[Comms], included: IncludedSet, *, voided: tuple[int, ...] = ()) -> None:
    """Publish the included set of a window as decided by these nodes: each publishes the documents of all.

    ``voided``: earlier windows that the decision voids.
    """
    value, window = Value(included=included, peers=None, voided=voided), included.window
    signers = {one.uid: one.signer for one in nodes}
    said = Echo(slot=0, value=value_id(value)), Commitment(value=value_id(value))
    echoes, words = (
        tuple(sign_document(one, window=window, signer=signers[uid]).decode() for uid in sorted(signers))
        for one in said
    )
    decision = Decision(slot=0, value=value, votes=(), echoes=echoes, commitments=words)
    for one in nodes:
        raw = sign_document(decision, window=window, signer=one.signer)
        await one.own_store.put(decision_key(window, included.version), raw)
