"""ForkLock: a lock that is free in a forked process, even if another thread of the parent holds it."""

import os
import threading
import weakref

_locks: "weakref.WeakSet[ForkLock]" = weakref.WeakSet()


class ForkLock:
    """A context manager like ``threading.Lock``. A forked process, such as a DataLoader's worker, gets the lock but not
    the thread that holds it, so an ordinary lock would never be released there. What the lock guards may be half
    written in the forked process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Release the lock in a forked process."""
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in [*_locks]:
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
