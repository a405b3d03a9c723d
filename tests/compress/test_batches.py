"""Tensors of one shape come together, each once, and what is computed for all of them goes back to each."""

import torch

from tplr.compress import chunks
from tplr.compress.batches import batches
from tplr.compress.layout import PayloadSpec

SHAPES = {"a": (8, 12), "b": (20, 12), "c": (8, 12), "d": (12,), "e": (8, 12), "f": (12,)}
SPEC = PayloadSpec.of(SHAPES, outer="demo", target_chunk=4, topk=3, bits=2)
CPU = torch.device("cpu")


def test_batches_hold_tensors_of_one_shape_up_to_a_slab(monkeypatch):
    monkeypatch.setitem(chunks.SLAB_ENTRIES, "cpu", 200)
    names = [[place.name for place in batch.places] for batch in batches(SPEC, CPU)]
    assert names == [["a", "c"], ["e"], ["b"], ["d", "f"]]


def test_rows_of_a_batch_are_those_of_its_tensors(monkeypatch):
    monkeypatch.setitem(chunks.SLAB_ENTRIES, "cpu", 200)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for batch in batches(SPEC, CPU):
        whole = torch.cat([tensors[place.name].view(-1, 12) for place in batch.places])
        for rows, which in batch.grid.row_blocks():
            cut = batch.cut(tensors, rows)
            assert torch.equal(cut, batch.grid.cut(whole[rows]))
            assert len(cut) == which.stop - which.start
            batch.add(tensors, rows, cut, alpha=-1)
    assert not any(tensor.any() for tensor in tensors.values())
