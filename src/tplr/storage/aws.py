"""Finds a bucket's credentials like AWS's own tools: from variables, profiles, roles or instances."""

from collections.abc import Mapping
from typing import Any

from tplr.config import BucketLocation, S3Bucket
from tplr.errors import ConfigError


def aws_location(name: str, variables: Mapping[str, str]) -> BucketLocation:
    """Return the location of the bucket ``name`` of S3 or a compatible service. Blocks.

    Credentials are ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` and ``AWS_SESSION_TOKEN`` of ``variables``, or else
    the first ones that botocore finds: a profile (``AWS_PROFILE``), a role, single sign-on, a container, an instance.
    Without credentials, requests are not signed, and only public buckets can be read.

    Raises:
        ConfigError: half a key, no such profile, or credentials that can't be fetched.
    """
    key, secret = variables.get("AWS_ACCESS_KEY_ID", ""), variables.get("AWS_SECRET_ACCESS_KEY", "")
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    if bool(key) != bool(secret):
        raise ConfigError(f"bucket {name!r}: only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both")
    if key:
        region = region or "us-east-1"
        bucket = S3Bucket(
            name=name,
            access_key_id=key,
            secret_access_key=secret,
            session_token=variables.get("AWS_SESSION_TOKEN", ""),
        )
        return BucketLocation(bucket, endpoint or f"https://s3.{region}.amazonaws.com", region)
    found = _FoundCredentials(name, variables.get("AWS_PROFILE"), region, endpoint)
    return BucketLocation(found.bucket(), found.endpoint, found.region, renew=found.bucket if found.expire else None)


class _FoundCredentials:
    """The credentials and the location that botocore finds for a bucket.

    Attributes:
        expire: whether the credentials expire; botocore then fetches new ones in time.
    """

    def __init__(self, name: str, profile: str | None, region: str | None, endpoint: str | None) -> None:
        from botocore import UNSIGNED, session
        from botocore.config import Config
        from botocore.credentials import RefreshableCredentials

        self._name = name
        try:
            found = session.Session(profile=profile)
            self._credentials: Any = found.get_credentials()
            region = region or found.get_config_variable("region") or "us-east-1"
            client = found.create_client(
                "s3", region_name=region, endpoint_url=endpoint, config=Config(signature_version=UNSIGNED)
            )
        except Exception as error:  # a profile may name a program, which may fail in any way
            raise self._problem(error) from error
        self.region: str = region
        self.endpoint: str = client.meta.endpoint_url
        self.expire = isinstance(self._credentials, RefreshableCredentials)

    def bucket(self) -> S3Bucket:
        """Return the bucket with its current credentials; blocks while new ones are fetched. Raises ConfigError."""
        if self._credentials is None:
            return S3Bucket(name=self._name)
        try:
            now = self._credentials.get_frozen_credentials()
        except Exception as error:
            raise self._problem(error) from error
        return S3Bucket(
            name=self._name,
            access_key_id=now.access_key,
            secret_access_key=now.secret_key,
            session_token=now.token or "",
        )

    def _problem(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"bucket {self._name!r}: no R2_… variables are set for it, AWS_ACCESS_KEY_ID is not set, and AWS's "
            f"configuration can't be used: {error}"
        )
