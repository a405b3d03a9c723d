"""Credentials of a localnet, read by the code that production uses."""

import pytest

from tplr.chain.commitment import encode_commitment
from tplr.config import Environment
from tplr.errors import ConfigError
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.testing.s3server.keys import parse_keys


def test_the_variables_are_what_a_node_reads():
    account = new_account()
    environment = Environment(bucket_variables("gradients", account, "read", "write"))
    assert environment.bucket("gradients", "read") == account.readable
    assert environment.bucket("gradients", "write") == account.writable


def test_a_node_may_only_read_the_dataset():
    account = new_account("dataset")
    environment = Environment(bucket_variables("dataset", account, "read"))
    assert environment.bucket("dataset", "read") == account.readable
    with pytest.raises(ConfigError):
        environment.bucket("dataset", "write")


def test_a_gradients_bucket_can_be_committed_on_chain():
    assert len(encode_commitment(new_account().readable)) == 128


def test_the_server_takes_the_table_and_tells_reading_from_writing():
    mine, other = new_account(), new_account("dataset")
    keys = parse_keys(key_table([mine, other]))
    assert len(keys) == 4
    reader, writer = keys[mine.readable.access_key_id], keys[mine.writable.access_key_id]
    assert reader.secret == mine.readable.secret_access_key
    assert reader.may("read", mine.name)
    assert not reader.may("write", mine.name)
    assert writer.may("write", mine.name)
    assert not writer.may("read", "dataset")


def test_no_two_accounts_share_anything_and_none_shows_its_secrets():
    accounts = [new_account() for _ in range(3)]
    values = [
        value
        for account in accounts
        for bucket in (account.readable, account.writable)
        for value in (bucket.access_key_id, bucket.secret_access_key)
    ]
    assert len(set(values)) == 12
    assert not any(value in repr(account) for account in accounts for value in values)
