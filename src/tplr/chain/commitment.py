"""Converts a commitment's 128 characters to and from a read-only bucket: 32 account id, 32 access key id, 64 secret."""

from dataclasses import fields

from tplr.schemas import Bucket

LENGTH = 128


def encode_commitment(bucket: Bucket) -> str:
    """Encode a bucket for the chain, where anybody can read it: pass read-only credentials only.

    Raises:
        ValueError: a commitment can't express this bucket's name, jurisdiction or keys.
    """
    try:
        # ``Bucket`` validates its fields; subclasses for other servers skip that.
        Bucket(**{field.name: getattr(bucket, field.name) for field in fields(Bucket)})
    except ValueError as error:
        raise ValueError(f"a commitment has room for R2's ids and keys only: {error}") from None
    if bucket.name != bucket.account_id:
        raise ValueError(
            f"a committed bucket must be named like its account id, the only name that peers get; "
            f"this one is named {bucket.name!r}: create a bucket named {bucket.account_id!r}"
        )
    if bucket.jurisdiction != "default":
        raise ValueError(
            f"a commitment can't name the jurisdiction {bucket.jurisdiction!r} of a bucket: peers would look in "
            "the default one; use a bucket without jurisdiction"
        )
    return bucket.account_id + bucket.access_key_id + bucket.secret_access_key


def decode_commitment(text: str) -> Bucket:
    """Decode the bucket in a commitment; every part is checked against its alphabet and length.

    Raises:
        ValueError: the text is not a bucket; the message does not contain the text.
    """
    if len(text) != LENGTH:
        raise ValueError(f"commitment: expected {LENGTH} characters, got {len(text)}")
    account_id = text[:32]
    return Bucket(name=account_id, account_id=account_id, access_key_id=text[32:64], secret_access_key=text[64:])
