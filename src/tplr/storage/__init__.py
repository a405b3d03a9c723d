"""Object stores: one protocol over S3, a folder or a dictionary. Large objects are transferred in parts."""

from tplr.storage.base import ObjectStore
from tplr.storage.directory import DirectoryStore
from tplr.storage.download import discard_download, download_file
from tplr.storage.many import delete_many
from tplr.storage.memory import MemoryStore
from tplr.storage.plain_folder import PlainFolder
from tplr.storage.s3 import S3Connections, endpoint_url
from tplr.storage.s3_http import TransferLimits
from tplr.storage.s3_store import S3Store
from tplr.storage.upload import abort_uploads, etag_of, upload_file, upload_stream

__all__ = [
    "DirectoryStore",
    "MemoryStore",
    "ObjectStore",
    "PlainFolder",
    "S3Connections",
    "S3Store",
    "TransferLimits",
    "abort_uploads",
    "delete_many",
    "discard_download",
    "download_file",
    "endpoint_url",
    "etag_of",
    "upload_file",
    "upload_stream",
]
