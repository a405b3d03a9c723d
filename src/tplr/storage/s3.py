"""Connections to S3-compatible servers, as R2 needs them."""

from collections.abc import Callable
from typing import Self

from tplr.config import Environment, HttpsSettings, S3Bucket, check_all, checked_endpoint
from tplr.errors import ConfigError
from tplr.schemas import Bucket
from tplr.storage.s3_client import S3Client
from tplr.storage.s3_http import ConnectionPool, TransferLimits
from tplr.storage.s3_store import S3Store


def endpoint_url(bucket: Bucket, override: str | None = None) -> str:
    """Return a bucket's endpoint: its account's R2 endpoint, or the local configuration's ``override``.

    ``Bucket`` has checked the account id and the jurisdiction, so the host is one of Cloudflare's.

    Raises:
        ConfigError: without ``override``, for a bucket of another kind of server.
    """
    if override is not None:
        return override
    if isinstance(bucket, S3Bucket):
        raise ConfigError(f"bucket {bucket.name!r} has keys that are not R2 keys: set TPLR_S3_ENDPOINT to its server")
    jurisdiction = "" if bucket.jurisdiction == "default" else f".{bucket.jurisdiction}"
    return f"https://{bucket.account_id}{jurisdiction}.r2.cloudflarestorage.com"


class S3Connections(ConnectionPool):
    """Owns the threads and connections of its stores until the end of the ``async with`` block.

    Args:
        endpoint: ``http(s)://host[:port]`` of another S3-compatible server for all buckets; never from the chain.
        https: HTTPS settings; default: those of this process's environment, read here.
        limits: default deadlines of all stores.
        region: region for which requests are signed; R2's is ``auto``.

    Raises:
        ConfigError: ``endpoint`` is not such a URL.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        https: HttpsSettings | None = None,
        limits: TransferLimits | None = None,
        region: str = "auto",
    ) -> None:
        super().__init__(https or Environment.read().https)
        self.endpoint = None if endpoint is None else checked_endpoint(endpoint, "S3 endpoint")
        self._limits = limits or TransferLimits()
        self._region = region

    @classmethod
    def of(cls, environment: Environment, *, region: str | None = None) -> Self:
        """Create connections for the environment's server, and its region unless one is given.

        Raises:
            ConfigError: lists all problems of endpoint, region and HTTPS settings.
        """
        check_all(
            lambda: environment.endpoint,
            lambda: region or environment.region,
            lambda: environment.https,
        )
        return cls(environment.endpoint, region=region or environment.region, https=environment.https)

    def store(self, bucket: Bucket, renew: Callable[[], Bucket] | None = None) -> S3Store:
        """Return the bucket's store; it connects at its first request. See ``BucketLocation`` about ``renew``."""
        endpoint = endpoint_url(bucket, self.endpoint)
        return S3Store(S3Client(bucket, endpoint, self._region, self, self._limits, renew))
