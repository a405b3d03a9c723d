"""Everything on chain is public: with a committed bucket a stranger can read it and nothing more."""

import contextlib

import pytest

from tplr.chain import ChainManager
from tplr.chain.commitment import encode_commitment
from tplr.chain.local import LocalChain
from tplr.errors import AccessDenied
from tplr.localnet.accounts import key_table, new_account
from tplr.storage import S3Connections
from tplr.testing.s3server import serve


async def test_what_stands_on_chain_opens_a_bucket_for_reading_only(world, tmp_path):
    world.join("miner")
    account = new_account()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(tmp_path / "s3", key_table([account])))
        miner = await stack.enter_async_context(LocalChain(world.path, "miner", clock=world.clock))
        stranger = await stack.enter_async_context(LocalChain(world.path, "stranger", clock=world.clock))
        own, foreign = [await stack.enter_async_context(S3Connections(server.endpoint)) for _ in range(2)]
        await own.store(account.writable).put("update", b"mine")
        await world.clock.drive(miner.commit(encode_commitment(account.readable)))

        (on_chain,) = (await stranger.commitments(["miner"])).values()
        for key in (account.writable.access_key_id, account.writable.secret_access_key):
            assert key not in on_chain.data
        bucket = await ChainManager(stranger, blocks_per_window=3).get_bucket_for_neuron("miner")
        assert bucket is not None
        store = foreign.store(bucket)
        assert (await store.get("update", max_bytes=100)) == b"mine"
        assert [info.key for info in await store.list()] == ["update"]
        for harm in (store.put("update", b"theirs"), store.put("more", b"theirs"), store.delete("update")):
            with pytest.raises(AccessDenied):
                await harm
        assert [info.key for info in await own.store(account.writable).list()] == ["update"]
        assert (await own.store(account.writable).get("update", max_bytes=100)) == b"mine"
