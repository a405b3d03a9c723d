"""Signs arbitrary documents with a hostile node's hotkey."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tplr.exchange.ballots import Echo, Proposal, Relay, Value, value_id
from tplr.exchange.envelope import Run, Signer, body_of, sign_body, sign_document


class Label(NamedTuple):
    """The labels in the true document's envelope."""

    kind: str
    window: int
    uid: int


@dataclass(frozen=True)
class Sealer:
    """Opens envelopes, and seals other documents, signed by the node's own hotkey.

    Attributes:
        sign: like ``Chain.sign``; None: this node signs nothing.
    """

    run: Run
    hotkey: str
    sign: Callable[[bytes], bytes] | None

    def body(self, data: bytes) -> bytes:
        """Return a document's JSON without its envelope."""
        head, newline, body = data.partition(b"\n")
        return body if newline and b'"signature":' in head else data

    def label(self, data: bytes) -> Label | None:
        """Return the labels of a document's envelope; None for a document without one."""
        if self.body(data) is data:
            return None
        told = json.loads(data.partition(b"\n")[0])
        return Label(told["kind"], told["window"], told["uid"])

    def sealed(self, data: bytes, body: bytes) -> bytes:
        """Return ``body`` in an envelope with the labels of the true document ``data``.

        Without an envelope of ``data``, or if this node signs nothing, the body is returned bare.
        """
        label = self.label(data)
        if label is None or self.sign is None:
            return data[: len(data) - len(self.body(data))] + body
        return sign_body(body, kind=label.kind, window=label.window, signer=self._signer(label.uid, self.sign))

    def other_proposal(self, data: bytes) -> bytes | None:
        """Return a second, conflicting proposal for the slot of its relay ``data``: signed and well-formed, but empty.

        None if ``data`` is not a relay of a proposal by this node, or if that proposes no update.
        """
        label = self.label(data)
        if label is None or label.kind != Relay.kind or self.sign is None:
            return None
        relay = Relay.model_validate_json(self.body(data))
        mine = self.label(relay.proposal.encode())
        if mine is None or mine.uid != label.uid:
            return None
        proposal = Proposal.model_validate_json(self.body(relay.proposal.encode()))
        included = proposal.value.included
        if not included.included:
            return None
        signer = self._signer(label.uid, self.sign)
        value = Value(included=included.model_copy(update={"included": included.included[1:]}), peers=None)
        other = Proposal(slot=proposal.slot, value=value, votes=proposal.votes)
        echo = Echo(slot=proposal.slot, value=value_id(value))
        signed = [sign_document(one, window=label.window, signer=signer).decode() for one in (echo, other)]
        false = relay.model_copy(update={"echo": signed[0], "proposal": signed[1]})
        return sign_body(body_of(false), kind=label.kind, window=label.window, signer=signer)

    def _signer(self, uid: int, sign: Callable[[bytes], bytes]) -> Signer:
        return Signer(self.run, uid, self.hotkey, sign)
