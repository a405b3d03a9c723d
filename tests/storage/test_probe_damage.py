"""The probe of damaged uploads against another server; ``tests/test_doctor.py`` has ours and its faults."""

from collections.abc import Iterator

import pytest

from tplr.storage import S3Store
from tplr.storage.probe import ProbeResult
from tplr.storage.probe_damage import probe_damage


@pytest.mark.asyncio(loop_scope="module")
async def test_moto_takes_what_arrives_damaged(moto_stores: Iterator[S3Store]) -> None:
    store = next(moto_stores)
    (finding,) = await probe_damage(store)
    assert finding.verdict is ProbeResult.WARNING
    assert finding.found.count("accepted although it does not match") == 3
    assert await store.list() == await store.multipart.unfinished() == []
