"""Signatures of a hostile node over whatever it likes."""

import hashlib
import json
from dataclasses import dataclass

from tplr.exchange.envelope import Identity, _Label


@dataclass(frozen=True)
class Sealer:
    """Takes documents out of their envelopes, and puts others in, signed by the node's own hotkey.

    Attributes:
        identity: None: this node signs nothing.
    """

    identity: Identity | None

    def body(self, data: bytes) -> bytes:
        """The JSON of a document."""
        head, newline, body = data.partition(b"\n")
        return body if newline and b'"signature":' in head else data

    def sealed(self, data: bytes, body: bytes) -> bytes:
        """Another body in the envelope of the true document ``data``; bare if that is."""
        head = data[: len(data) - len(self.body(data))]
        if not head or self.identity is None:
            return head + body
        told = json.loads(head)
        label = _Label(self.identity.run, told["kind"], told["window"], told["uid"], self.identity.hotkey)
        signature = self.identity.sign(label.message(hashlib.sha256(body).hexdigest()))
        return label.header(signature.hex()) + body
