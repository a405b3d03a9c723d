"""Storage accounts of a localnet: random credentials in R2's formats, as key table and as environment variables."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tplr.config import Access, Kind
from tplr.schemas import Bucket


@dataclass(frozen=True)
class Account:
    """One bucket, with a key that can read it and one that can also write; ``repr`` shows neither."""

    readable: Bucket
    writable: Bucket

    @property
    def name(self) -> str:
        """Of the bucket."""
        return self.readable.name


def new_account(bucket_name: str | None = None) -> Account:
    """An account with one bucket. Its name is the account id if not given, as a bucket that peers shall find needs."""
    account_id = secrets.token_hex(16)

    def bucket() -> Bucket:
        return Bucket(
            name=bucket_name or account_id,
            account_id=account_id,
            access_key_id=secrets.token_hex(16),
            secret_access_key=secrets.token_hex(32),
        )

    return Account(readable=bucket(), writable=bucket())


def key_table(accounts: Iterable[Account]) -> dict[str, Any]:
    """What the storage server reads: rights of each key (``s3server/keys.py`` has the format)."""
    table = {}
    for account in accounts:
        for bucket, right in ((account.readable, "read"), (account.writable, "read-write")):
            table[bucket.access_key_id] = {"secret": bucket.secret_access_key, "buckets": {bucket.name: right}}
    return table


def bucket_variables(kind: Kind, account: Account, *accesses: Access) -> dict[str, str]:
    """Environment variables of one kind of bucket (``config.py`` has their names), with the keys for ``accesses``."""
    prefix = f"R2_{kind.upper()}"
    variables = {f"{prefix}_ACCOUNT_ID": account.readable.account_id, f"{prefix}_BUCKET_NAME": account.name}
    for access in accesses:
        bucket = account.readable if access == "read" else account.writable
        variables[f"{prefix}_{access.upper()}_ACCESS_KEY_ID"] = bucket.access_key_id
        variables[f"{prefix}_{access.upper()}_SECRET_ACCESS_KEY"] = bucket.secret_access_key
    return variables
