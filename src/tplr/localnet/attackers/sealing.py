"""Signatures of a hostile node over whatever it likes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tplr.exchange.ballots import Echo, Proposal, Relay, Value, value_id
from tplr.exchange.envelope import Run, Signer, body_of, sign_body, sign_document


class Label(NamedTuple):
    """What the true document's envelope says."""

    kind: str
    window: int
    uid: int


@dataclass(frozen=True)
class Sealer:
    """Takes documents out of their envelopes, and puts others in, signed by the node's own hotkey.

    Attributes:
        sign: as ``Chain.sign``; None: this node signs nothing.
    """

    run: Run
    hotkey: str
    sign: Callable[[bytes], bytes] | None

    def body(self, data: bytes) -> bytes:
        """The JSON of a document."""
        head, newline, body = data.partition(b"\n")
        return body if newline and b'"signature":' in head else data

    def label(self, data: bytes) -> Label | None:
        """Of a document in an envelope; None for a bare one."""
        if self.body(data) is data:
            return None
        told = json.loads(data.partition(b"\n")[0])
        return Label(told["kind"], told["window"], told["uid"])

    def sealed(self, data: bytes, body: bytes) -> bytes:
        """Another body in the envelope of the true document ``data``; bare if that is, or nothing is signed."""
        label = self.label(data)
        if label is None or self.sign is None:
            return data[: len(data) - len(self.body(data))] + body
        return sign_body(body, kind=label.kind, window=label.window, signer=self._signer(label.uid, self.sign))

    def other_proposal(self, data: bytes) -> bytes | None:
        """A second proposal of this node for the slot of its relay ``data``: signed, well-formed and without an update.

        None if that is no relay of a proposal by this node, or if it proposes no update.
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
