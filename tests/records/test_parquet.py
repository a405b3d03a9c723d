"""Rows from any start position, for any row groups; a failed read skips nothing."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tplr.records import parquet
from tplr.records.parquet import ParquetReader


@pytest.fixture
def file(monkeypatch) -> io.BytesIO:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 3)
    out = io.BytesIO()
    pq.write_table(pa.table({"n": range(23), "m": range(23)}), out, row_group_size=5)
    return out


def test_every_row_can_be_the_first(file):
    for start in range(25):
        reader = ParquetReader(file, columns=["n"])
        reader.seek(start)
        assert [row["n"] for row in reader] == [*range(start, 23)]
        assert next(reader, None) is None


def test_the_position_is_behind_the_last_row(file):
    reader = ParquetReader(file)
    positions = [(reader.group, reader.row) for _ in reader]
    assert positions[:7] == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]
    for done, (group, row) in enumerate(positions, 1):
        assert [found["m"] for found in ParquetReader(file, group, row)] == [*range(done, 23)]


class Flaky(io.BytesIO):
    fails = False

    def read(self, *size):
        if self.fails:
            self.fails = False
            raise OSError("broken")
        return super().read(*size)


def test_a_failed_read_is_repeated(file):
    flaky = Flaky(file.getvalue())
    reader, rows, failures = ParquetReader(flaky), [], 0
    while len(rows) < 23:
        flaky.fails = len(rows) % 5 == 0 and failures <= len(rows) // 5
        try:
            rows.append(next(reader)["n"])
        except OSError:
            failures += 1
    assert rows == [*range(23)]
    assert failures == 5


def test_rows_whose_values_can_not_be_read_are_not_skipped(file):
    def values(batch: pa.RecordBatch) -> list[int]:
        if 7 in (found := batch.column(0).to_pylist()):
            raise ValueError("seven")
        return found

    reader = ParquetReader(file, values=values)
    assert [next(reader) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(ValueError, match="seven"):
            next(reader)
        assert (reader.group, reader.row) == (1, 0)


COUNTS = """
import os, sys
import torch
from tplr.records.parquet import ParquetReader
before = len(os.listdir("/proc/self/task"))
with open(sys.argv[1], "rb") as file:
    assert sum(1 for _ in ParquetReader(file)) == 23
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.fixture
def path(file: io.BytesIO, tmp_path: Path) -> Path:
    (tmp_path / "small.parquet").write_bytes(file.getvalue())
    return tmp_path / "small.parquet"


@pytest.fixture
def busy() -> Iterator[None]:
    """Two processes that compute continuously."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait()


def test_pyarrow_starts_no_thread(path: Path) -> None:
    """Its threads sometimes abort the process at exit if torch is loaded."""
    assert subprocess.check_output([sys.executable, "-c", COUNTS, path], text=True) == "0\n"


@pytest.mark.usefixtures("busy")
@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_command_ends_well_on_a_busy_machine(path: Path) -> None:
    command = [sys.executable, "-m", "tplr.cli", "data", "peek", str(path)]
    assert [subprocess.run(command, capture_output=True, check=False).returncode for _ in range(30)] == [0] * 30
