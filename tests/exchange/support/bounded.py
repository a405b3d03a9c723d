"""Opens the largest envelopes of each kind, in a process with limits on time and memory.

Arguments: seconds of processor time, and bytes of memory above those of a process that has opened none. Prints the
numbers of refused and of opened envelopes.
"""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from hostile import KINDS, UID, WINDOW, bombs
from signers import signed, signer

from tplr.errors import PayloadError
from tplr.exchange.envelope import body_of, open_document
from tplr.exchange.snapshot import SnapshotManifest

ME = signer(UID)


def limit(seconds: int, size: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    for kind, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + size),
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds),
    ):
        resource.setrlimit(kind, (most, most))


def full_manifests() -> Iterator[bytes]:
    """Yield valid manifests with any content of ``values``."""
    body = body_of(KINDS["SnapshotManifest"])
    size = SnapshotManifest.max_bytes - len(body)
    for item in (b"1.5", b'{"a":1}'):
        many = b",".join([item] * (size // (len(item) + 1)))
        yield body.replace(b"[1,2]", b"[%s]" % many)


def main() -> None:
    """Open them all."""
    limit(*map(int, sys.argv[1:]))
    refused = opened = 0
    for document in KINDS.values():
        schema = type(document)
        for bomb in bombs(schema, min(schema.max_bytes, 2**20) - 100):
            raw = signed(bomb, schema, window=WINDOW, by=ME)
            try:
                open_document(raw, schema, window=WINDOW, author=ME)
            except PayloadError:
                refused += 1
    for body in full_manifests():
        raw = signed(body, SnapshotManifest, window=WINDOW, by=ME)
        open_document(raw, SnapshotManifest, window=WINDOW, author=ME)
        opened += 1
    sys.stdout.write(f"{refused} {opened}\n")


if __name__ == "__main__":
    main()
