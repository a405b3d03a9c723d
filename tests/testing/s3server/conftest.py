"""An unmodified aiobotocore with production configuration, against a server in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.handlers
import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import ClientError

from tplr.testing.s3server import Rules, Server, serve

OWNER, READER, WRITER, STRANGER = ("1" * 32, "2" * 32, "3" * 32, "4" * 32)

# One session: it keeps the service's description, which takes longer to load than most tests take.
SESSION = get_session()


def secret_of(access_key_id: str) -> str:
    return access_key_id * 2


@pytest.fixture
def keys() -> dict[str, Any]:
    grants = {
        OWNER: {"gradients": "read-write", "checkpoints": "read-write"},
        READER: {"gradients": "read"},
        WRITER: {"gradients": "write"},
    }
    return {key_id: {"secret": secret_of(key_id), "buckets": buckets} for key_id, buckets in grants.items()}


@pytest.fixture
def rules() -> Rules:
    """R2's rules, but with parts of 1 KiB and no limit on the rate of writes; separate tests cover these two."""
    return Rules(one_write_per_second=False, min_part_bytes=1024)


@pytest.fixture
async def server(tmp_path: Path, keys: dict[str, Any], rules: Rules) -> AsyncIterator[Server]:
    async with serve(tmp_path / "root", keys, rules=rules) as running:
        yield running


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Any]]:
    """``await connect(server, key_id)`` gives a client that lives as long as the test."""
    async with AsyncExitStack() as stack:

        async def open_client(
            server: Server | SimpleNamespace,
            access_key_id: str = OWNER,
            *,
            secret: str | None = None,
            region: str = "auto",
            signed: bool = False,
            checksums: str = "when_required",
        ) -> Any:
            config = AioConfig(
                signature_version="s3v4",
                connect_timeout=5,
                read_timeout=10,
                retries={"mode": "standard", "total_max_attempts": 1},
                request_checksum_calculation=checksums,
                response_checksum_validation=checksums,
                s3={"addressing_style": "path", "payload_signing_enabled": signed},
            )
            client = await stack.enter_async_context(
                SESSION.create_client(
                    "s3",
                    endpoint_url=server.endpoint,
                    region_name=region,
                    aws_access_key_id=access_key_id,
                    aws_secret_access_key=secret or secret_of(access_key_id),
                    config=config,
                )
            )
            client.meta.events.unregister("before-call.s3", botocore.handlers.add_expect_header)
            return client

        yield open_client


@pytest.fixture
async def s3(server: Server, connect: Callable[..., Any]) -> Any:
    """The owner's client."""
    return await connect(server)


@pytest.fixture
def refusal() -> Callable[..., Any]:
    """``await refusal(call)`` gives the (status, code) that the call is refused with."""

    async def refused(call: Any) -> tuple[int, str]:
        with pytest.raises(ClientError) as caught:
            await call
        response = caught.value.response
        return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]

    return refused
