"""A localnet's storage accounts: random credentials in R2's formats, as key table and environment variables."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tplr.config import Access, Kind
from tplr.schemas import Bucket


@dataclass(frozen=True)
class Account:
    """A bucket with a read key and a read-write key; ``repr`` shows neither."""

    readable: Bucket
    writable: Bucket

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.readable.name


def new_account(bucket_name: str | None = None) -> Account:
    """Create an account with one bucket. The default bucket name is the account id, as gradients buckets require."""
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
    """Return the storage server's key table (``s3server/keys.py`` has the format)."""
    table = {}
    for account in accounts:
        for bucket, right in ((account.readable, "read"), (account.writable, "read-write")):
            table[bucket.access_key_id] = {"secret": bucket.secret_access_key, "buckets": {bucket.name: right}}
    return table


def bucket_variables(kind: Kind, account: Account, *accesses: Access) -> dict[str, str]:
    """Return the environment variables of a bucket of this kind (see ``config.py``), with the keys for ``accesses``."""
    prefix = f"R2_{kind.upper()}"
    variables = {f"{prefix}_ACCOUNT_ID": account.readable.account_id, f"{prefix}_BUCKET_NAME": account.name}
    for access in accesses:
        bucket = account.readable if access == "read" else account.writable
        variables[f"{prefix}_{access.upper()}_ACCESS_KEY_ID"] = bucket.access_key_id
        variables[f"{prefix}_{access.upper()}_SECRET_ACCESS_KEY"] = bucket.secret_access_key
    return variables
