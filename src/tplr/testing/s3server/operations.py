"""The table of operations: the requests that each one matches, the right it needs, the parameters it accepts."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tplr.testing.s3server import op_listing, op_multipart, op_objects
from tplr.testing.s3server.checksums import CHECKSUM_HEADERS
from tplr.testing.s3server.keys import Right
from tplr.testing.s3server.request import Reply, S3Request
from tplr.testing.s3server.storage import Storage


@dataclass(frozen=True)
class Operation:
    """An operation of the server.

    Attributes:
        right: the right that the key needs in the bucket.
        parameters: accepted query parameters; any other is refused.
        headers: accepted x-amz- headers, in addition to those of every operation.
        conditional: whether If-Match and the other conditional headers are honoured; if not, they are refused.
    """

    serve: Callable[[Storage, S3Request], Awaitable[Reply]]
    right: Right
    parameters: frozenset[str] = frozenset()
    headers: frozenset[str] = frozenset()
    conditional: bool = False


# (method, target of the path, the query parameter that distinguishes operations)
OPERATIONS: dict[tuple[str, str, str], Operation] = {
    ("HEAD", "bucket", ""): Operation(op_objects.head_bucket, "read"),
    ("GET", "bucket", "list-type"): Operation(
        op_listing.list_objects,
        "read",
        frozenset(
            {"prefix", "delimiter", "start-after", "continuation-token", "max-keys", "encoding-type", "fetch-owner"}
        ),
    ),
    ("GET", "bucket", "uploads"): Operation(
        op_multipart.list_uploads,
        "write",
        frozenset({"prefix", "key-marker", "upload-id-marker", "max-uploads"}),
    ),
    ("POST", "bucket", "delete"): Operation(op_objects.delete_objects, "write", headers=CHECKSUM_HEADERS),
    ("PUT", "object", ""): Operation(op_objects.put_object, "write", headers=CHECKSUM_HEADERS, conditional=True),
    ("GET", "object", ""): Operation(op_objects.get_object, "read", conditional=True),
    ("HEAD", "object", ""): Operation(op_objects.get_object, "read", conditional=True),
    ("DELETE", "object", ""): Operation(op_objects.delete_object, "write"),
    ("POST", "object", "uploads"): Operation(
        op_multipart.create_upload, "write", headers=frozenset({"x-amz-checksum-algorithm"})
    ),
    ("PUT", "object", "uploadId"): Operation(
        op_multipart.upload_part, "write", frozenset({"partNumber"}), CHECKSUM_HEADERS
    ),
    ("POST", "object", "uploadId"): Operation(op_multipart.complete_upload, "write", conditional=True),
    ("DELETE", "object", "uploadId"): Operation(op_multipart.abort_upload, "write"),
    ("GET", "object", "uploadId"): Operation(
        op_multipart.list_parts, "write", frozenset({"max-parts", "part-number-marker"})
    ),
}
