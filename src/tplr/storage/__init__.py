"""Object stores: one protocol, and S3, a folder or a dictionary behind it."""

from tplr.storage.base import ObjectStore
from tplr.storage.directory import DirectoryStore
from tplr.storage.memory import MemoryStore
from tplr.storage.s3 import S3Connections, endpoint_url
from tplr.storage.s3_store import Limits, S3Store

__all__ = ["DirectoryStore", "Limits", "MemoryStore", "ObjectStore", "S3Connections", "S3Store", "endpoint_url"]
