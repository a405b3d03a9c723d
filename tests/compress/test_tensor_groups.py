"""Tensors of one shape are grouped, each once, and results of a group return to the right tensors."""

import pytest
import torch

from tplr.compress import chunks
from tplr.compress.layout import PayloadSpec
from tplr.compress.tensor_groups import tensor_groups

SHAPES = {"a": (8, 12), "b": (20, 12), "c": (8, 12), "d": (12,), "e": (8, 12), "f": (12,)}
SPEC = PayloadSpec.of(SHAPES, outer="demo", target_chunk=4, topk=3, bits=2)
SPREAD = PayloadSpec.of(SHAPES, outer="sparseloco", target_chunk=4, topk=3, bits=2, selection="group")
CPU = torch.device("cpu")


def test_groups_hold_tensors_of_one_shape_up_to_a_row_block(monkeypatch):
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 200)
    names = [[tensor.name for tensor in group.tensors] for group in tensor_groups(SPEC, CPU)]
    assert names == [["a", "c"], ["e"], ["b"], ["d", "f"]]


@pytest.mark.parametrize("spec", [SPEC, SPREAD])
def test_bands_of_a_group_are_those_of_its_tensors(spec, monkeypatch):
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 200)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for group in tensor_groups(spec, CPU):
        whole = torch.cat([one.grid.view(tensors[one.name]) for one in group.tensors])
        for bands, which in group.grid.row_blocks():
            cut = group.cut(tensors, bands)
            assert torch.equal(cut, group.grid.cut(whole[bands]))
            assert len(cut) == which.stop - which.start
            group.add(tensors, bands, cut, alpha=-1)
    assert not any(tensor.any() for tensor in tensors.values())
