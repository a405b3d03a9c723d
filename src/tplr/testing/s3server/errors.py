"""Every error code of the server, with its HTTP status."""

from collections.abc import Mapping

# Codes as R2 documents them; codes that R2 does not list are S3's.
STATUS = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "BadDigest": 400,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidArgument": 400,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRegionName": 400,
    "KeyTooLongError": 400,
    "MalformedXML": 400,
    "MetadataTooLarge": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "TooManyRequests": 429,
    "Unauthorized": 401,
    "XAmzContentSHA256Mismatch": 400,
}


class S3Error(Exception):
    """A refusal. The server turns it into a reply."""

    def __init__(self, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.code = code
        self.status = STATUS[code]
        self.message = message
        self.headers = dict(headers or {})
        super().__init__(f"{self.status} {code}: {message}")
