"""Authors with real key pairs, for tests of signed documents."""

from bittensor_core import Keypair

from tplr.exchange.envelope import Run, Signer, body_of, sign_body
from tplr.schemas import Document


def signer(uid: int = 5, *, name: str | None = None, version: str = "1", netuid: int = 3) -> Signer:
    """Return the signer of ``uid``; by default with a separate key."""
    return Signer.with_key(Run(netuid, version), uid, Keypair.create_from_uri(f"//{name or uid}"))


def signed(body: Document | bytes, schema: type[Document], *, window: int, by: Signer) -> bytes:
    """Return the envelope of a body, valid or not."""
    raw = body if isinstance(body, bytes) else body_of(body)
    return sign_body(raw, kind=schema.kind, window=window, signer=by)
