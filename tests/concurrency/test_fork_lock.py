"""A forked process can enter a lock that another thread of its parent holds."""

import os
import threading

from tplr.concurrency.fork_lock import ForkLock


def test_a_forked_process_gets_a_free_lock():
    lock, held, done = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        threading.Timer(10, os._exit, (1,)).start()  # the lock is still held
        for _ in range(2):
            with lock:
                pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not lock._lock.acquire(blocking=False)  # here the thread still holds it
    done.set()
    thread.join()
    with lock:
        pass
