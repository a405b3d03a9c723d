"""Tensors in sharded safetensors files: bytes, rounding, sizes and index."""

import json

import pytest
import torch
from safetensors import safe_open

from tplr.exchange.snapshot import COPY_BYTES, TensorLayout
from tplr.run.weights import INDEX, SINGLE_FILE, weight_files, write_weights


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    shapes = {"b": (40, 30), "a": (7,), "scalar": (), "empty": (0, 4), "c": (3, 5, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layouts(tensors):
    return {name: TensorLayout.of(one) for name, one in tensors.items()}


def read(folder):
    found = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_one_file_holds_what_was_written(tensors, tmp_path, dtype, torch_dtype):
    assert write_weights(tmp_path, tensors, layouts(tensors), dtype) == [SINGLE_FILE]
    found = read(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(torch_dtype))
        assert found[name].shape == tensor.shape


def test_shards_are_no_larger_than_asked_and_the_index_finds_every_tensor(tensors, tmp_path):
    names = write_weights(tmp_path, tensors, layouts(tensors), max_bytes=300)
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(one.nbytes for one in tensors.values())}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    assert index["weight_map"].keys() == tensors.keys()
    sizes = [sum(tensors[name].nbytes for name, file in index["weight_map"].items() if file == one) for one in names]
    assert all(size <= 300 or size == tensors["b"].nbytes for size in sizes)


def test_a_large_tensor_is_written_in_blocks(tmp_path):
    rows = torch.arange(COPY_BYTES // 4 + 1000, dtype=torch.float32).reshape(-1, 8)
    write_weights(tmp_path, {"x": rows.clone()}, {"x": TensorLayout.of(rows)})
    assert torch.equal(read(tmp_path)["x"], rows)


def test_each_tensor_is_read_once_and_let_go(tensors, tmp_path):
    accessed = []

    class Lazy(dict):
        def __getitem__(self, name):
            accessed.append(name)
            return super().__getitem__(name).clone()

    write_weights(tmp_path, Lazy(tensors), layouts(tensors))
    assert accessed == sorted(tensors)
