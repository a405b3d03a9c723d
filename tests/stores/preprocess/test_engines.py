"""The error of an engine after a worker dies; ``test_pipeline.py`` compares the bytes of all engines."""

from concurrent.futures import Future

import pytest

from tplr.concurrency.workers import WorkerDied
from tplr.errors import DataError
from tplr.stores.preprocess.engines import _results


def test_a_dead_worker_is_a_data_error_that_names_the_remedy():
    def submit(chunk):
        future = Future()
        if chunk == "large":
            future.set_exception(WorkerDied("a worker process ended with status -9 during a call"))
        else:
            future.set_result(f"{chunk}, encoded")
        return future

    results = _results(["small", "large"], submit, 2)
    assert next(results) == ("small", "small, encoded")
    with pytest.raises(DataError, match="status -9 during a call: out of memory"):
        next(results)
