"""Rows of tensors in memory and on disk: the same blocks, hashes and files, and no tensor is read whole."""

import pytest
import torch
from snapshots import save

from tplr.node.state import SavedState, StateFolder
from tplr.run.weights import write_weights
from tplr.training import rows
from tplr.training.fingerprint import digest, fingerprint, outer_fingerprint
from tplr.training.rows import row_blocks, shape_of

SHAPES = {"wide": (7, 300), "long": (2000,), "cube": (5, 3, 40), "scalar": ()}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def saved(tensors, tmp_path) -> SavedState:
    return save(StateFolder(tmp_path / "state"), window=3, global_step=3, groups={"model": tensors})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(rows, "BLOCK_BYTES", 2400)


def test_blocks_are_the_rows_in_order(tensors, saved) -> None:
    stored = saved.lazily("model")
    for name, tensor in tensors.items():
        assert shape_of(stored, name) == shape_of(tensors, name) == tensor.shape
        for source in (tensors, stored):
            blocks = [block.reshape(-1) for block in row_blocks(source, name)]
            assert torch.equal(torch.cat([torch.empty(0), *blocks]), tensor.reshape(-1))
            assert all(block.nbytes <= 2400 for block in blocks)
    assert len([*row_blocks(stored, "wide")]) == 4


def test_hashes_and_files_are_the_same_from_disk_as_from_memory(tensors, saved, tmp_path) -> None:
    stored = saved.lazily("model")
    assert digest(stored) == digest(tensors)
    for seed in range(4):
        stored_now, kept = (fingerprint(one, step=3, seed=seed, samples=200) for one in (stored, tensors))
        assert stored_now == kept
        stored_now, kept = (outer_fingerprint(one, seed=seed, samples=200) for one in (stored, tensors))
        assert stored_now == kept
    layouts = {name.removeprefix("model."): layout for name, layout in saved.manifest.tensors.items()}
    for dtype in ("float32", "bfloat16"):
        files = []
        for source in (tensors, stored):
            folder = tmp_path / f"{dtype}-{len(files)}"
            folder.mkdir()
            write_weights(folder, source, layouts, dtype)
            files.append((folder / "model.safetensors").read_bytes())
        assert files[0] == files[1]


def test_an_outer_fingerprint_has_every_entry_of_small_tensors_and_some_of_large_ones() -> None:
    shared = {"shared.caps.a": torch.ones(8), "shared.momentum.a": torch.arange(2000.0).reshape(50, 40)}

    def hashed(seed: int = 1) -> str:
        return outer_fingerprint(shared, seed=seed, samples=100)

    before = hashed()
    for i in range(8):
        shared["shared.caps.a"][i] += 1e-6
        assert hashed() != before
        shared["shared.caps.a"][i] = 1.0
    assert hashed() == before != hashed(2)
    shared["shared.momentum.a"] += 1
    assert hashed() != before


def test_nothing_is_read_whole(saved, monkeypatch, tmp_path) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read whole")

    stored = saved.lazily("model")
    monkeypatch.setattr(type(stored), "__getitem__", refused)
    digest(stored)
    fingerprint(stored, step=1, seed=1, samples=50)
    outer_fingerprint(stored, seed=1, samples=50)
    layouts = {name.removeprefix("model."): layout for name, layout in saved.manifest.tensors.items()}
    write_weights(tmp_path, stored, layouts)
