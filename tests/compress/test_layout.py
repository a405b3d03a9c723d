"""Offsets and sizes follow from shapes and settings, and cover the object without gaps."""

from pathlib import Path

import pytest
import torch

from tplr.compress.layout import PayloadSpec, entries_kept
from tplr.compress.payload import build
from tplr.compress.topk import select
from tplr.hparams import load_hparams


def small(shapes, **changes) -> PayloadSpec:
    return PayloadSpec.of(shapes, **{"outer": "demo", "target_chunk": 64, "topk": 32, "bits": 2} | changes)


def test_order_of_the_shapes_does_not_matter():
    assert small({"a": (64, 64), "b": (8,)}) == small({"b": (8,), "a": (64, 64)})


@pytest.mark.parametrize(
    "changes",
    [
        {"topk": 31},
        {"bits": 4},
        {"target_chunk": 32},
        {"scale": "tensor"},
        {"selection": "group"},
        {"outer": "other"},
        {"shapes": {"a": (4096,)}},
    ],
)
def test_everything_that_changes_the_meaning_changes_the_layout(changes):
    assert small(**{"shapes": {"a": (64, 64)}} | changes).layout != small({"a": (64, 64)}).layout


def test_sections_follow_each_other_without_gaps(spec):
    at = spec.data_start
    assert at % 8 == 0
    for section in ("codebook", "values", "scales", "indices"):
        for tensor in spec.tensors.values():
            where = getattr(tensor, section)
            assert where.start == at
            at = where.stop
    assert at == spec.expected_size


def test_bytes_of_a_matrix_are_those_of_the_plan():
    tensor = small({"a": (128, 64)}).tensors["a"]
    sizes = [where.stop - where.start for where in (tensor.codebook, tensor.values, tensor.scales, tensor.indices)]
    assert sizes == [16, 2 * 32 * 2 // 8, 2, 2 * 32 * 9 // 8]


@pytest.mark.parametrize(
    ("entries", "topk", "bits", "kept"),
    [
        (4096, 32, 2, 32),
        (64, 32, 2, 64),  # 32 * 2 + 96 bits of indices against 64 * 2
        (32, 6, 1, 32),  # 6 * 1 + 26 against 32 * 1
        (64, 32, 4, 32),  # 32 * 4 + 96 against 64 * 4
        (64, 32, 0, 32),
        (16, 32, 0, 16),
    ],
)
def test_a_tensor_travels_dense_where_that_is_no_larger(entries, topk, bits, kept):
    assert entries_kept(entries, topk, bits) == kept


@pytest.mark.parametrize(
    ("entries", "topk", "bits", "kept"),
    [
        (4096, 128, 1, 128),
        (4096, 88, 1, 128),  # n / k is 46: groups of 32
        (403, 6, 1, 7),  # groups of at most 64, here of 57 or 58
        (64, 128, 1, 64),
        (32, 8, 1, 8),  # 8 * 1 + 8 * 2 against 32 * 1
        (32, 16, 1, 32),  # 16 * 1 + 16 * 1 against 32 * 1
    ],
)
def test_groups_have_a_power_of_two_entries(entries, topk, bits, kept):
    assert entries_kept(entries, topk, bits, grouped=True) == kept


def test_indices_of_groups_cost_their_place_in_the_group():
    tensor = small({"a": (128, 64)}, topk=128, bits=1, selection="group").tensors["a"]
    assert tensor.k == 128
    assert tensor.indices.stop - tensor.indices.start == 2 * 128 * 5 // 8


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"topk": 0}, {"target_chunk": 0}, {"shapes": {}}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        small(**{"shapes": {"a": (4, 4)}} | wrong)


def test_a_runs_updates_have_the_size_that_its_hparams_say():
    hparams = load_hparams(Path(__file__).parents[2] / "hparams-demo.json")
    shapes = {"a": (128, 64), "norm": (64,), "odd": (13, 31)}
    for changes in ({}, {"quantization_bits": 4, "quantization_scale": "tensor"}, {"quantization_bits": 0}):
        changed = hparams.model_copy(update=changes)
        spec = PayloadSpec.from_hparams(shapes, changed)
        made = {
            name: (
                torch.arange(tensor.k).expand(tensor.grid.chunks, -1),
                torch.ones(tensor.grid.chunks, tensor.k),
            )
            for name, tensor in spec.tensors.items()
        }
        body = build(made, spec, window=1, uid=0, pages_digest="0" * 64, batches=1)
        assert len(body) == spec.expected_size


def test_groups_choose_among_rows_of_the_whole_matrix():
    """Tokens are ordered by frequency, more or less: chunks of neighbouring rows have as many rare ones."""
    embedding = torch.rand(256, 64, generator=torch.Generator().manual_seed(1))
    embedding[:64] += 1
    sent = {}
    for selection in ("chunk", "group"):
        tensor = small({"embedding": (256, 64)}, outer="sparseloco", topk=128, selection=selection).tensors["embedding"]
        grid = tensor.grid
        indices, _ = select(grid.cut(grid.view(embedding)), tensor.k, grouped=tensor.grouped)
        marks = torch.zeros(grid.shape)
        grid.view(marks).copy_(grid.join(torch.zeros(grid.chunks, grid.entries).scatter(1, indices, 1.0)))
        sent[selection] = marks.sum(dim=1).unflatten(0, (4, 64)).sum(dim=1).tolist()
    assert sent == {"chunk": [128, 128, 128, 128], "group": [512, 0, 0, 0]}
