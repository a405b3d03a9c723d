"""URLs and paths of files: expands braces and globs, and derives schemes, origins, names and versions."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from blake3 import blake3
from braceexpand import braceexpand

from tplr.errors import ConfigError, DataError
from tplr.home_paths import expanded

Url = str | os.PathLike[str]

STORE_SCHEMES = ("s3", "r2")
_WILD = re.compile(r"[*?\[]")
_LOCAL, _HASHED_END = "local-", 2**16


class StoreKey(NamedTuple):
    """An object's bucket and key."""

    bucket: str
    key: str


def expand_braces(urls: Url | Sequence[Url]) -> list[str]:
    """Expand ``{00..99}`` and ``{a,b}`` in one or several URLs or paths, in the written order.

    Raises:
        DataError: a brace has no partner.
    """
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    try:
        return [expanded for url in given for expanded in braceexpand(os.fspath(url))]
    except ValueError as error:  # UnbalancedBracesError, which the type stubs lack
        raise DataError(f"{error}: close the brace, or write \\{{ or \\}} for a brace of the name") from error


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; ``file`` for a plain path."""
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", url)
    return match[1].lower() if match else "file"


def origin(url: str) -> str:
    """Return only scheme, host and port, because all other parts of an endpoint may contain an access key."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "an endpoint"
    if not parts.hostname:
        return "an endpoint"
    return f"{parts.scheme}://{f'[{parts.hostname}]' if ':' in parts.hostname else parts.hostname}{port}"


def only_origins(text: str) -> str:
    """Return a text, such as an error of a client, with the ``origin`` of each URL in it."""
    return re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+", lambda match: origin(match[0]), text)


def local_path(url: str) -> Path:
    """Return the path of a plain path or a ``file://`` URL, with the home folder for ``~`` or ``~USER``.

    Raises:
        DataError: the home folder is unknown, and no file has that name.
    """
    path = Path(unquote(url.removeprefix("file://")) if url.startswith("file://") else url)
    try:
        return expanded(path)
    except ConfigError as error:
        if path.exists():  # such as a match of a pattern
            return path
        raise DataError(str(error)) from None


def store_key(url: str) -> StoreKey:
    """Return bucket and key of ``s3://bucket/key``. Raises DataError if one is missing."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise DataError(f"{url}: expected {scheme_of(url)}://bucket/key")
    return StoreKey(bucket, key)


def file_name(url: str) -> str:
    """Return the name that shows a file's type, in lower case, without query and folders."""
    path = urlsplit(url).path if scheme_of(url) in ("http", "https") else url
    return path.rsplit("/", 1)[-1].lower()


def relative_names(urls: Sequence[str]) -> tuple[str, list[str]]:
    """Return the common folder of all files, and their names in it without queries, which are equal in copies."""
    paths = [url.partition("?")[0] if scheme_of(url) in ("http", "https") else url for url in urls]
    first, last = min(paths, default=""), max(paths, default="")  # their common prefix is that of all paths
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    root = first[: first.rfind("/", 0, same) + 1]
    return root, [path[len(root) :] for path in paths]


def is_pattern(url: str) -> bool:
    """Return whether a URL is a glob pattern; a local file with exactly that name is not."""
    scheme = scheme_of(url)
    if scheme == "file":
        return bool(_WILD.search(url)) and not local_path(url).exists()
    return scheme not in ("http", "https") and bool(_WILD.search(url))


def local_matches(url: str) -> list[str]:
    """List files that match a local pattern (``**``: any folders), sorted. Raises FileNotFoundError if none does."""
    found = sorted(path for path in glob.glob(str(local_path(url)), recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise FileNotFoundError(f"{url}: no file matches")
    return found


def fixed_prefix(key: str) -> str:
    """Return the part of a pattern before its first wildcard."""
    return _WILD.split(key, maxsplit=1)[0]


def key_matches(pattern: str, key: str) -> bool:
    """Match a key as a glob: ``*`` and ``?`` match within a folder, ``**/`` matches any number of folders."""
    return re.fullmatch(_regex(pattern), key) is not None


def version_of(size: int, etag: str = "") -> str:
    """Return the version that identifies a file's content: its size, and its ETag if it has one."""
    return f"{size}:{etag}" if etag else str(size)


def local_version(file: int) -> str:
    """Return the version of a local file (descriptor): its size, and the BLAKE3 of its first and last 64 KiB.

    Copies and moves do not change it. An edit in the middle of a larger file that keeps its size is not detected.
    """
    size = os.fstat(file).st_size
    ends = os.pread(file, _HASHED_END, 0) + os.pread(file, _HASHED_END, max(_HASHED_END, size - _HASHED_END))
    return version_of(size, _LOCAL + blake3(ends).hexdigest()[:16])


def version_of_copy(version: str, url: str) -> str:
    """Return the part of a version that a copy at ``url`` shares: ETags are per bucket, hashes only for local files."""
    size, _, tag = version.partition(":")
    return version if tag.startswith(_LOCAL) and scheme_of(url) == "file" else size


def check_version(url: str, expected: str, found: str) -> None:
    """Raise DataError if a file is not the one of a saved state. A version without ETag is only a size."""
    if ":" not in expected:
        found = found.partition(":")[0]
    if expected and expected != found:
        raise DataError(
            f"{url}: the state was saved in a file of version (size and ETag or hash) {expected}, this one is "
            f"{found}: bring the old file back, or start without the state"
        )


def _regex(pattern: str) -> str:
    out, at = "", 0
    for match in re.finditer(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]", pattern):
        out += re.escape(pattern[at : match.start()])
        wild = match[0]
        if wild == "**/":
            out += "(?:.*/)?"
        elif wild.startswith("["):
            letters = re.escape(wild.strip("[]").removeprefix("!")).replace(r"\-", "-")
            out += f"[^{letters}]" if wild[1] == "!" else f"[{letters}]"
        else:
            out += {"**": ".*", "*": "[^/]*", "?": "[^/]"}[wild]
        at = match.end()
    return out + re.escape(pattern[at:])
