"""The pages' digest of a node depends on the pages and on the version of the dataset."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tplr.errors import ConfigError
from tplr.hparams import load_hparams
from tplr.node.data_loader import WindowDataLoader
from tplr.node.sources import PageDataSource, check_address
from tplr.pages.build import write_dataset
from tplr.pages.dataset import PageDataset
from tplr.stores.expected_files import local_prefix


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")


async def own_pages(folder: Path, tokenizer):
    async def window_hash(window: int) -> str:
        return f"0x{window:064x}"

    hparams = load_hparams(Path(__file__).parents[2] / "hparams-demo.json")
    hparams = hparams.model_copy(update={"batch_size": 2, "sequence_length": 32, "pages_per_window": 2})
    store, prefix = local_prefix(folder)
    dataset = await PageDataset.open([store], prefix, tokenizer)
    comms = SimpleNamespace(window_hash=window_hash)
    async with WindowDataLoader(PageDataSource(dataset, hparams), comms) as data_loader:  # pyright: ignore[reportArgumentType]
        return await data_loader.assigned(3, 7)


async def test_the_same_pages_of_another_version_are_other_pages(tmp_path, tokenizer):
    for name in ("one", "two", "reordered"):
        with write_dataset(tmp_path / name, rows_per_group=50, rows_per_shard=100) as writer:
            writer.add("a", [f"the text of row {i}" for i in range(200)])
    one, two = [await own_pages(tmp_path / name, tokenizer) for name in ("one", "two")]
    assert one.digest == two.digest
    assert (one.batches == two.batches).all()
    assert len(one.batches)
    # The same shards in another order: the same names refer to rows of other pages.
    sizes = json.loads((tmp_path / "reordered/_shard_sizes.json").read_text())
    sizes["a"]["shards"].reverse()
    (tmp_path / "reordered/_shard_sizes.json").write_text(json.dumps(sizes))
    assert (await own_pages(tmp_path / "reordered", tokenizer)).digest != one.digest


async def test_a_dataset_of_another_address_rule_is_refused(tmp_path, tokenizer):
    with write_dataset(tmp_path / "one", rows_per_group=50, rows_per_shard=100) as writer:
        writer.add("a", ["a text"] * 200)
    store, prefix = local_prefix(tmp_path / "one")
    manifest = (await PageDataset.open([store], prefix, tokenizer)).manifest
    hparams = load_hparams(Path(__file__).parents[2] / "hparams-demo.json")
    check_address(manifest, hparams.model_copy(update={"page_address": "exact"}))
    with pytest.raises(ConfigError, match="by 'exact', page_address in hparams is 'group-average'"):
        check_address(manifest, hparams)
