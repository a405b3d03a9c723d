"""R2's limits, and its limit of one write per second to a key.

Sources: Cloudflare's R2 pages "Limits", "Multipart objects" and "Error codes".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tplr.testing.s3server.errors import S3Error

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Sizes in bytes, times in seconds. The defaults are R2's; tests may shrink them."""

    one_write_per_second: bool = True
    max_clock_skew: float = 15 * 60
    # On R2, a changed token takes up to a minute to take effect.
    permission_delay: float = 0.0
    max_put_bytes: int = 5 * 1024 * MIB - 5 * MIB
    max_object_bytes: int = 4995 * 2**40 // 1000
    min_part_bytes: int = 5 * MIB
    max_part_number: int = 10_000
    # R2's default lifecycle rule aborts an upload that is not completed in this time.
    max_upload_seconds: float = 7 * 24 * 3600.0
    max_key_bytes: int = 1024
    max_metadata_bytes: int = 8192
    # A feature of S3 that R2 lacks: requests without a signature may read these buckets.
    public_buckets: frozenset[str] = frozenset()

    def check_key(self, key: str) -> None:
        size = len(key.encode())
        if size > self.max_key_bytes:
            raise S3Error("KeyTooLongError", f"The key has {size} bytes; at most {self.max_key_bytes} are allowed.")

    def check_body_length(self, length: int | None) -> int:
        """Returns the announced length of a PUT's body. Raises MissingContentLength or EntityTooLarge."""
        if length is None:
            raise S3Error("MissingContentLength", "A PUT needs a Content-Length.")
        if length > self.max_put_bytes:
            raise S3Error(
                "EntityTooLarge", f"{length} bytes in one PUT; at most {self.max_put_bytes} are allowed: use multipart."
            )
        return length

    def check_metadata(self, headers: Mapping[str, str]) -> None:
        size = sum(
            len(name) - len("x-amz-meta-") + len(value.encode("utf-8", "surrogateescape"))
            for name, value in headers.items()
            if name.startswith("x-amz-meta-")
        )
        if size > self.max_metadata_bytes:
            raise S3Error(
                "MetadataTooLarge", f"User metadata of {size} bytes; at most {self.max_metadata_bytes} are allowed."
            )


class WriteRate:
    """The last write of each key; another write within a second is refused."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}  # oldest first

    def admit(self, bucket: str, key: str, now: float) -> None:
        """Records a write at ``now`` (seconds, any clock). Raises TooManyRequests within a second of the last one."""
        last = self._last.get((bucket, key))
        if last is not None and 0 <= now - last < 1:
            raise S3Error(
                "TooManyRequests", f"{bucket}/{key} was written {now - last:.3f} s ago; a key takes one write a second."
            )
        self._last.pop((bucket, key), None)
        self._last[(bucket, key)] = now
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._last:
            oldest = next(iter(self._last))
            if 0 <= now - self._last[oldest] < 1:
                break
            del self._last[oldest]
