"""Multipart uploads on disk: a folder of parts each, and R2's checks of the parts when an upload is completed."""

import hashlib
import re
import secrets
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tplr.testing.s3server.blobfile import Draft, read_record
from tplr.testing.s3server.checksums import composite_checksum
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.objects import ObjectFiles, StoredObject
from tplr.testing.s3server.preconditions import Conditions
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.xmltext import ChosenPart


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An upload's record, in a blob file without bytes.

    Attributes:
        initiated: unix seconds.
        algorithm: the checksum that every part has to carry; empty if none.
    """

    key: str
    upload_id: str
    initiated: float
    headers: dict[str, str]
    algorithm: str = ""
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class UploadedPart:
    """A part's record. ``etag`` is its MD5, 32 hex digits; ``last_modified`` unix seconds; ``size`` bytes."""

    number: int
    size: int
    etag: str
    last_modified: float
    checksums: dict[str, str] = field(default_factory=dict)


class UploadFiles:
    """Uploads of every bucket. The methods block, and may be called from any thread."""

    def __init__(self, objects: ObjectFiles, rules: Rules) -> None:
        self._objects = objects
        self._rules = rules
        self._lock = threading.Lock()
        self._completing: set[str] = set()

    def create(self, bucket: str, key: str, headers: dict[str, str], algorithm: str) -> Upload:
        now = self._objects.now()
        # The time comes first: ids sort by start, and a listing can resume after any of them.
        upload_id = f"{round(now * 1000):016x}{secrets.token_hex(24)}"
        upload = Upload(key=key, upload_id=upload_id, initiated=now, headers=headers, algorithm=algorithm)
        folder = self._folder(bucket) / upload_id
        folder.mkdir(parents=True)
        draft = self._objects.draft()
        try:
            draft.publish(folder / "upload", asdict(upload))
        except OSError:
            folder.rmdir()
            raise
        finally:
            draft.discard()
        return upload

    def find(self, bucket: str, key: str, upload_id: str) -> Upload:
        """Raises NoSuchUpload if the id is unknown, of another key, completed, aborted or too old."""
        if re.fullmatch(r"[0-9a-f]{64}", upload_id):  # it becomes part of a path
            upload = self._read(bucket, self._folder(bucket) / upload_id / "upload")
            if upload and upload.key == key:
                return upload
        raise S3Error("NoSuchUpload", "There is no such upload of this key: unknown, completed, aborted or expired.")

    def put_part(self, bucket: str, upload: Upload, part: UploadedPart, draft: Draft) -> None:
        """Stores the part; replaces an earlier part with the same number."""
        draft.sync()
        try:
            draft.publish(self._folder(bucket) / upload.upload_id / f"part-{part.number:05d}", asdict(part))
        except FileNotFoundError as error:
            raise S3Error("NoSuchUpload", "The upload was completed or aborted in the meantime.") from error

    def parts(self, bucket: str, upload: Upload) -> list[UploadedPart]:
        """The parts, in the order of their numbers."""
        paths = sorted((self._folder(bucket) / upload.upload_id).glob("part-*"))
        try:
            return [_read_part(path) for path in paths]
        except FileNotFoundError as error:
            raise S3Error("NoSuchUpload", "The upload was completed or aborted in the meantime.") from error

    def uploads(self, bucket: str, prefix: str) -> list[Upload]:
        """Unfinished uploads whose keys begin with ``prefix``, sorted by key and id."""
        found = [self._read(bucket, path) for path in self._folder(bucket).glob("*/upload")]
        matching = [upload for upload in found if upload and upload.key.startswith(prefix)]
        return sorted(matching, key=lambda upload: (upload.key, upload.upload_id))

    def _read(self, bucket: str, path: Path) -> Upload | None:
        """Reads an upload's record; None if it has ended. An upload that is too old is aborted here."""
        try:
            with path.open("rb") as file:
                upload = Upload(**read_record(file))
        except FileNotFoundError:
            return None
        if self._objects.now() - upload.initiated > self._rules.max_upload_seconds:
            self.abort(bucket, upload)
            return None
        return upload

    def abort(self, bucket: str, upload: Upload) -> None:
        shutil.rmtree(self._folder(bucket) / upload.upload_id, ignore_errors=True)

    def complete(
        self, bucket: str, upload: Upload, chosen: Sequence[ChosenPart], conditions: Conditions
    ) -> StoredObject:
        """Joins the chosen parts into the object and removes the upload.

        Raises:
            S3Error: InvalidPartOrder, InvalidPart, EntityTooSmall: the upload stays. PreconditionFailed: it is
                aborted, as R2 does. NoSuchUpload: another complete of it is under way.
        """
        with self._lock:
            if upload.upload_id in self._completing:
                raise S3Error("NoSuchUpload", "The upload is being completed.")
            self._completing.add(upload.upload_id)
        try:
            self.find(bucket, upload.key, upload.upload_id)  # the last complete may have ended just now
            parts = self._check_parts({part.number: part for part in self.parts(bucket, upload)}, chosen)
            record = self._join(bucket, upload, parts, conditions)
            self.abort(bucket, upload)  # before another complete may begin, which would find an upload without parts
        except S3Error as error:
            if error.code == "PreconditionFailed":
                self.abort(bucket, upload)
            raise
        finally:
            with self._lock:
                self._completing.discard(upload.upload_id)
        return record

    def _check_parts(self, stored: dict[int, UploadedPart], chosen: Sequence[ChosenPart]) -> list[UploadedPart]:
        numbers = [choice.number for choice in chosen]
        if numbers != sorted(set(numbers)):
            raise S3Error("InvalidPartOrder", "Part numbers have to be in ascending order.")
        for choice in chosen:
            part = stored.get(choice.number)
            if part is None or part.etag != choice.etag or not choice.checksums.items() <= part.checksums.items():
                raise S3Error("InvalidPart", f"Part {choice.number} was not uploaded, or has another ETag or checksum.")
        parts = [stored[number] for number in numbers]
        for part in parts[:-1]:
            if part.size < self._rules.min_part_bytes:
                raise S3Error(
                    "EntityTooSmall",
                    f"Part {part.number} has {part.size} bytes; all but the last need {self._rules.min_part_bytes}.",
                )
        if len({part.size for part in parts[:-1]}) > 1 or parts[-1].size > parts[0].size:
            raise S3Error("InvalidPart", "All non-trailing parts must have the same length, the last at most that.")
        if (size := sum(part.size for part in parts)) > self._rules.max_object_bytes:
            raise S3Error("EntityTooLarge", f"{size} bytes; an object has at most {self._rules.max_object_bytes}.")
        return parts

    def _join(self, bucket: str, upload: Upload, parts: list[UploadedPart], conditions: Conditions) -> StoredObject:
        checksums = composite_checksum(upload.algorithm, [part.checksums for part in parts])
        draft = self._objects.draft()
        try:
            for part in parts:
                path = self._folder(bucket) / upload.upload_id / f"part-{part.number:05d}"
                with path.open("rb") as file:
                    if UploadedPart(**read_record(file)) != part:
                        raise S3Error("InvalidPart", f"Part {part.number} was replaced in the meantime.")
                    draft.append(file, part.size)
                # The joined object needs no second copy, neither on disk nor in memory.
                path.unlink()
            return self._objects.commit(
                bucket,
                upload.key,
                draft,
                etag=multipart_etag([part.etag for part in parts]),
                headers=upload.headers,
                checksums=checksums,
                conditions=conditions,
            )
        finally:
            draft.discard()

    def _folder(self, bucket: str) -> Path:
        return self._objects.folder(bucket) / "uploads"


def multipart_etag(md5s: Sequence[str]) -> str:
    """S3's ETag of a multipart object: the MD5 of the parts' MD5s (as bytes), a dash and the number of parts."""
    joined = b"".join(bytes.fromhex(md5) for md5 in md5s)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(md5s)}"


def _read_part(path: Path) -> UploadedPart:
    with path.open("rb") as file:
        return UploadedPart(**read_record(file))
