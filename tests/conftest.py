"""For all tests: a failure is reported, whatever the garbage collector meets meanwhile."""

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A report parses the failed test's source. In Python 3.11 that fails with a SystemError, which ends the whole
    run, if something is collected in between whose end logs a traceback: that parses source, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
