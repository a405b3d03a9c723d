"""Events as nodes emit them, and views made of them."""

import pytest
from network_events import Recording


@pytest.fixture
def recording():
    return Recording()


@pytest.fixture
def run(recording):
    """A run of ten windows in which all went well."""
    for number in range(1, 11):
        recording.window(number)
    return recording
