"""aiobotocore used as in its own documentation: the baseline for our transfers."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from tplr.schemas import Bucket


def plain_client(endpoint: str, bucket: Bucket) -> AbstractAsyncContextManager[Any]:
    """Return a client with the bucket's key, without checksums except those that a call requests."""
    return AioSession().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="auto",
        aws_access_key_id=bucket.access_key_id,
        aws_secret_access_key=bucket.secret_access_key,
        config=AioConfig(
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
