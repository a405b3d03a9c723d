"""The picture of a run's losses."""

import struct
from pathlib import Path

import pytest

from tplr.localnet.picture import draw_losses

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("windows", [0, 1, 10])
def test_a_run_of_any_length_is_drawn(recording, windows: int, tmp_path: Path) -> None:
    for number in range(1, windows + 1):
        recording.window(number)
    draw_losses(recording.view(), tmp_path / "loss.png")
    written = (tmp_path / "loss.png").read_bytes()
    assert written.startswith(SIGNATURE)
    width, height = struct.unpack(">II", written[16:24])
    assert (width, height) == (800, 450)
