"""Decisions as a single elector publishes them."""

from tplr.comms import Comms
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.ballots import Commitment, Decision, Echo, Value, value_id
from tplr.exchange.envelope import sign_document
from tplr.keys import decision_key


async def publish_decision(comms: Comms, included: IncludedSet) -> None:
    """Publish the included set of a window as decided by the node of ``comms`` alone."""
    value = Value(included=included, peers=None)
    window, signer = included.window, comms.signer
    echo = sign_document(Echo(slot=0, value=value_id(value)), window=window, signer=signer).decode()
    word = sign_document(Commitment(value=value_id(value)), window=window, signer=signer).decode()
    decision = Decision(slot=0, value=value, votes=(), echoes=(echo,), commitments=(word,))
    raw = sign_document(decision, window=window, signer=signer)
    await comms.own_store.put(decision_key(window, included.version), raw)
