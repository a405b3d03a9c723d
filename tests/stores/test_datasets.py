"""Items of each train type against slices of plain lists, equal for every format."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_stores import column, write
from torch.utils.data import DataLoader

from tplr.errors import DataError
from tplr.stores.datasets import DatasetFactory, window_count
from tplr.stores.factory import StoreFactory
from tplr.stores.sampler import ResumableDistributedSampler

FORMATS = ("bin", "h5", "jsonl")


def sft_store(folder: Path, storage_format: str) -> Path:
    rows = [[*range(10, 17)], [*range(30, 45)]]
    return write(folder, storage_format, *(
        {
            "sequence": column([row], "int32"),
            "loss_mask": column([[x % 3 == 0 for x in row]], "bool"),
            "position_ids": column([[*range(len(row))]], "int64"),
        }
        for row in rows
    ))  # fmt: skip


def dpo_store(folder: Path, storage_format: str) -> Path:
    chosen, rejected = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10, 11], [12]]
    return write(folder, storage_format, {
        "chosen": column(chosen, "int32"),
        "chosen_mask": column([[x % 2 for x in row] for row in chosen], "bool"),
        "rejected": column(rejected, "int32"),
        "rejected_mask": column([[x % 2 for x in row] for row in rejected], "bool"),
    })  # fmt: skip


def grpo_store(folder: Path, storage_format: str) -> Path:
    responses = [[1, 2], [3], [4, 5, 6], [7]]
    return write(folder, storage_format, {
        "prompts": column([[9], [9, 8, 7]], "int32"),
        "responses": column(responses, "int32", [0, 2, 4]),
        "masks": column([[1] * len(row) for row in responses], "bool", [0, 2, 4]),
        "rewards": column([[0.8, 0.1], [1.0, 0.0]], "float32"),
    })  # fmt: skip


STORES = {"seq": sft_store, "sft": sft_store, "dpo": dpo_store, "grpo": grpo_store}


def test_windows_of_every_small_stream(tmp_path: Path) -> None:
    for total in range(1, 9):
        folder = write(tmp_path / str(total), "bin", {"sequence": column([[*range(100, 100 + total)]], "uint16")})
        for window in range(1, 9):
            for stride in range(1, 9):
                dataset = DatasetFactory.load("seq", folder, window, stride)
                begins = [b for b in range(0, total, stride) if b + window + 1 <= total]
                assert len(dataset) == len(begins)
                for i, begin in enumerate(begins):
                    assert dataset.get_index(i) == (begin, begin + window)
                    item = dataset[i]
                    assert item["input_ids"].tolist() == [*range(100 + begin, 100 + begin + window)]
                    assert item["target_ids"].tolist() == [*range(101 + begin, 101 + begin + window)]
                    assert item["input_ids"].dtype == item["target_ids"].dtype == torch.int64
                # Iteration by protocol ends, with the last window reached.
                assert len([*dataset]) == len(begins)
                with pytest.raises(IndexError):
                    dataset[len(begins)]
                if begins:
                    assert dataset[-1]["input_ids"].tolist() == dataset[len(begins) - 1]["input_ids"].tolist()


@pytest.mark.parametrize("storage_format", FORMATS)
@pytest.mark.parametrize(
    ("keys", "wrong", "expected"),
    [
        # Converted to integers, 3.7 would become 3.
        ({"seq": "sequence", "sft": "sequence", "dpo": "rejected", "grpo": "prompts"}, 3.7, "whole numbers"),
        # Converted to booleans, both would become True.
        ({"sft": "loss_mask", "dpo": "rejected_mask", "grpo": "masks"}, 0.5, "0 or 1"),
        ({"sft": "loss_mask", "dpo": "chosen_mask", "grpo": "masks"}, 2, "0 or 1"),
    ],
)
def test_numbers_that_a_conversion_would_change_are_refused(
    tmp_path: Path, storage_format: str, keys: dict[str, str], wrong: float, expected: str
) -> None:
    dtype = "float32" if isinstance(wrong, float) else "int32"
    lists = [[1, 1, 1, 1], [1, 1]]
    for kind, key in keys.items():
        others = {name: column(lists, "int32") for name in DatasetFactory.kinds[kind].required_keys}
        if kind == "grpo":
            others |= {name: column(lists, "int32", [0, 1, 2]) for name in ("responses", "masks")}
            others["rewards"] = column([[1.0], [1.0]], "float32")
        for number in (1, wrong):
            changed = replace(others[key], values=np.array([0, 1, number, 1, 1, 1], dtype))
            path = write(tmp_path / f"{kind}-{number}", storage_format, {**others, key: changed})
            dataset = DatasetFactory.load(kind, path, 2, storage_type=storage_format)
            if number == 1:
                values = dataset[0][key.replace("sequence", "input_ids")]
                assert values[0].dtype == (torch.bool if "mask" in key else torch.int64)
            else:
                with pytest.raises(DataError, match=rf"item 0: its {key!r} holds {number}, expected {expected}: "):
                    _ = [*dataset]


def test_the_documented_counts() -> None:
    assert [window_count(n, 64, 64) for n in (200, 65, 64, 0)] == [3, 1, 0, 0]


def test_sft_masks_follow_the_targets(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("sft", sft_store(tmp_path, "bin"), 5, 3)
    tokens = [*range(10, 17), *range(30, 45)]
    positions = [*range(7), *range(15)]
    assert len(dataset) == 6
    for i in range(6):
        begin, item = 3 * i, dataset[i]
        assert item["input_ids"].tolist() == tokens[begin : begin + 5]
        assert item["target_ids"].tolist() == tokens[begin + 1 : begin + 6]
        assert item["loss_mask"].tolist() == [x % 3 == 0 for x in item["target_ids"].tolist()]
        assert item["position_ids"].tolist() == positions[begin : begin + 5]
        assert (item["loss_mask"].dtype, item["position_ids"].dtype) == (torch.bool, torch.int64)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_who_changes_an_item_changes_no_later_one(tmp_path: Path, kind: str) -> None:
    """The store may have the same types as an item: without a copy, the item would be the store's memory."""
    folder = {"sft": sft_store, "dpo": dpo_store, "grpo": grpo_store}[kind](tmp_path, "bin")
    dataset = DatasetFactory.load(kind, folder, 5, 3)

    def tensors() -> list[torch.Tensor]:
        return [part for value in dataset[0].values() for part in (value if isinstance(value, list) else [value])]

    before = [one.clone() for one in tensors()]
    for one in tensors():
        one.zero_()
    assert all(torch.equal(*pair) for pair in zip(tensors(), before, strict=True))


def test_pairs_stay_pairs_and_are_padded_to_one_length(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("dpo", dpo_store(tmp_path, "bin"), 4)
    assert {key: value.tolist() for key, value in dataset[1].items()} == {
        "chosen": [4],
        "chosen_mask": [False],
        "rejected": [8, 9, 10, 11],
        "rejected_mask": [False, True, False, True],
    }
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["chosen"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert batch["rejected"].tolist() == [[7, 0, 0, 0], [8, 9, 10, 11]]
    assert batch["rejected_mask"].tolist() == [[True, False, False, False], [False, True, False, True]]
    assert (batch["chosen"].dtype, batch["chosen_mask"].dtype) == (torch.int64, torch.bool)


def test_groups_and_rewards(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", grpo_store(tmp_path, "bin"), 4)
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["prompts"].tolist() == [[0, 0, 9], [9, 8, 7]]
    assert batch["prompts_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert batch["responses"].tolist() == [[[1, 2, 0], [3, 0, 0]], [[4, 5, 6], [7, 0, 0]]]
    assert batch["masks"].sum(-1).tolist() == [[2, 1], [3, 1]]
    assert batch["rewards"].dtype == torch.float32
    assert batch["rewards"].tolist() == torch.tensor([[0.8, 0.1], [1.0, 0.0]]).tolist()
    one = {**dataset[1], "responses": dataset[1]["responses"][:1]}
    with pytest.raises(DataError, match=r"\[1, 2\] responses"):
        dataset.collate([dataset[0], one])


@pytest.mark.parametrize("train_type", STORES)
def test_every_format_gives_the_same_batches(tmp_path: Path, train_type: str) -> None:
    def batches(storage_format: str) -> list[dict[str, torch.Tensor]]:
        folder = STORES[train_type](tmp_path / storage_format, storage_format)
        dataset = DatasetFactory.load(train_type, folder, 4, storage_type=storage_format)
        sampler = ResumableDistributedSampler(dataset)
        return [*DataLoader(dataset, 2, sampler=sampler, collate_fn=dataset.collate)]

    first, *others = map(batches, FORMATS)
    assert first
    for other in others:
        assert len(other) == len(first)
        for one, same in zip(first, other, strict=True):
            assert list(one) == list(same)
            for key, value in one.items():
                assert value.dtype == same[key].dtype
                assert torch.equal(value, same[key])


def test_loader_workers_see_the_same(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("seq", sft_store(tmp_path, "bin"), 4)
    alone = [batch["input_ids"] for batch in DataLoader(dataset, 2)]
    shared = [batch["input_ids"] for batch in DataLoader(dataset, 2, num_workers=2)]
    assert torch.equal(torch.cat(alone), torch.cat(shared))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = dpo_store(tmp_path / "dpo", "bin")
    with pytest.raises(KeyError, match=r"lacks sequence, loss_mask.*available: chosen"):
        DatasetFactory.load("sft", folder, 4)
    with pytest.raises(ValueError, match="train_type 'ppo'"):
        DatasetFactory.load("ppo", folder, 4)
    with pytest.raises(ValueError, match="window_size 0"):
        DatasetFactory.load("seq", sft_store(tmp_path / "sft", "bin"), 0)
    path = folder / "shard_0000/meta.json"
    raw = json.loads(path.read_text())
    bare = {key: {"shape": raw[key]["shape"], "dtype": raw[key]["dtype"]} for key in raw if key != "_store"}
    path.write_text(json.dumps(bare))
    with pytest.raises(DataError, match="no record offsets"):
        DatasetFactory.load("dpo", folder, 4)
    uneven = {"chosen": column([[1, 2]], "int32"), "chosen_mask": column([[1]], "bool")}
    uneven |= {"rejected": column([[1, 2]], "int32"), "rejected_mask": column([[1, 1]], "bool")}
    with pytest.raises(DataError, match=r"record 0: chosen has lengths \[2\], chosen_mask \[1\]"):
        DatasetFactory.load("dpo", write(tmp_path / "uneven", "bin", uneven), 4)[0]


def test_a_loaded_store_goes_before_any_path(tmp_path: Path) -> None:
    store = StoreFactory.create("bin")
    store.load(sft_store(tmp_path, "bin"))
    assert len(DatasetFactory.load("seq", None, 4, store=store)) == 5
