"""Probes whether a bucket refuses damaged uploads: bodies that do not match their digests."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tplr.errors import StoreError, StoreUnavailable, UploadDamaged
from tplr.keys import probe_key
from tplr.storage.parts import FilePart
from tplr.storage.probe import Finding, ProbeResult
from tplr.storage.retry import with_retry
from tplr.storage.s3_multipart import S3Multipart
from tplr.storage.s3_store import S3Store
from tplr.storage.upload import abort_uploads

CHECK = "damaged uploads"
TIDY_SECONDS = 20.0

_BODY, _ANOTHER = b"templar", b"another"
_MD5, _SHA256 = hashlib.md5(_ANOTHER, usedforsecurity=False).hexdigest(), hashlib.sha256(_ANOTHER).hexdigest()
# Each upload with its kind of digest, and the consequence if the bucket accepts a body that does not match.
_MEANING = {
    "object by Content-MD5": "other nodes refuse a damaged update until it is uploaded again",
    "object by signed SHA-256": "not required: an object's ETag is verified after the upload",
    "part by signed SHA-256": "a checkpoint with a damaged part stays damaged; readers use another one",
}


async def probe_damage(writable: S3Store) -> list[Finding]:
    """Send two objects and a part with digests of other bytes. Removes them afterwards; a finding reports if that
    fails."""
    key = probe_key()
    tries: list[Callable[[], Awaitable[object]]] = [
        lambda: writable.put_claiming(f"{key}-1", _BODY, md5=_MD5),
        lambda: writable.put_claiming(f"{key}-2", _BODY, sha256=_SHA256),
        lambda: _put_part(writable, f"{key}-3"),
    ]
    findings: list[Finding] = []
    try:
        findings.append(_judge({what: await _refusal(send) for what, send in zip(_MEANING, tries, strict=True)}))
    finally:
        try:
            await _tidy(writable, key)
        except StoreError as error:
            left = f"{key}-* may still be there, also as unfinished uploads: {error}"
            findings.append(Finding(CHECK, ProbeResult.WARNING, left, "remove it"))
    return findings


async def _put_part(writable: S3Store, key: str) -> None:
    multipart = S3Multipart(writable.client)
    upload_id = await multipart.create(key)
    any_file = Path(__file__)
    await multipart.put_part(key, upload_id, FilePart(1, 0, len(_BODY)), any_file, _SHA256)


async def _refusal(send: Callable[[], Awaitable[object]]) -> StoreError | None:
    try:
        await send()
    except StoreError as error:
        return error
    return None


def _judge(refusals: Mapping[str, StoreError | None]) -> Finding:
    if taken := [what for what, refusal in refusals.items() if refusal is None]:
        return Finding(
            CHECK,
            ProbeResult.WARNING,
            "; ".join(f"{what}: accepted although it does not match ({_MEANING[what]})" for what in taken),
            "only TLS protects uploads to this bucket: use an https endpoint without a proxy, and another store if "
            "nodes log 'not the object's bytes' or 'arrived damaged'",
        )
    others = {what: refusal for what, refusal in refusals.items() if not isinstance(refusal, UploadDamaged)}
    if not others:
        return Finding(CHECK, ProbeResult.OK, f"refused: {', '.join(refusals)}")
    found = "; ".join(f"{what}: {refusal}" for what, refusal in others.items())
    if any(isinstance(refusal, StoreUnavailable) for refusal in others.values()):
        return Finding(CHECK, ProbeResult.WARNING, f"unknown: {found}", "try again")
    remedy = "report this error: a damaged upload ends with it instead of being sent again"
    return Finding(CHECK, ProbeResult.WARNING, f"refused, with an error that nodes do not know: {found}", remedy)


async def _tidy(writable: S3Store, key: str) -> None:
    """Remove stored objects, and abort the upload even if its id never arrived."""

    async def remove() -> None:
        for number in (1, 2):
            await writable.delete(f"{key}-{number}")
        await abort_uploads(writable, key)

    await with_retry(remove, deadline_seconds=TIDY_SECONDS)
