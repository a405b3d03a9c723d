"""An exported folder loads with every tensor matched and gives the node's logits, for each type of model."""

import json
from pathlib import Path

import pytest
import torch

from tplr.errors import ConfigError, StateError
from tplr.hparams import HParams
from tplr.localnet.corpus import EOS
from tplr.localnet.plan import scheme_constants
from tplr.model_check import MODEL_TYPES
from tplr.run.folder import file_hashes, load_model, model_layouts, write_model
from tplr.training.model import build_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
}
MORE = {"qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}


def constants(model_type: str = "llama", *, tied: bool = False) -> HParams:
    raw = scheme_constants("demo")
    model = SIZES | {"model_type": model_type, "tie_word_embeddings": tied, MODEL_TYPES[model_type]: "silu"}
    return HParams.model_validate(raw | {"model": model | MORE.get(model_type, {}), "sequence_length": 32})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {EOS: 0} | {letter: 1 + i for i, letter in enumerate(sorted(letters))}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS)


def written(folder: Path, hparams: HParams, tokenizer, **more):
    folder.mkdir()
    model = build_model(hparams)
    tensors = dict(model.named_parameters())
    options = {"dtype": "float32", "layouts": model_layouts(hparams), "hparams_text": b"{}"} | more
    write_model(folder, hparams=hparams, tokenizer=tokenizer, tensors=tensors, **options)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_folder_gives_the_nodes_logits(tmp_path, tokenizer, model_type, tied):
    model = written(tmp_path / "out", constants(model_type, tied=tied), tokenizer, max_shard_bytes=20_000)
    loaded = load_model(tmp_path / "out")  # refuses tensors that are missing or unknown
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_special_tokens_are_the_tokenizers(tmp_path, tokenizer):
    """The defaults of the model's configuration are other ids."""
    written(tmp_path / "out", constants(), tokenizer, dtype="bfloat16")
    loaded = load_model(tmp_path / "out")
    for settings in (loaded.model.config, loaded.model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, 0, None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["architectures"], config["use_cache"]) == ("bfloat16", ["LlamaForCausalLM"], True)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.tokenizer.decode(loaded.tokenizer("größe")["input_ids"]) == "größe"
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # which earlier versions know


def test_a_folder_that_is_none_and_one_that_is_damaged_are_errors(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"no config\.json, so it has no exported model"):
        load_model(tmp_path)
    folder = tmp_path / "out"
    written(folder, constants(), tokenizer, max_shard_bytes=20_000)
    before = file_hashes(folder)
    assert "model.safetensors.index.json" in before
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert {name for name, found in file_hashes(folder).items() if found != before[name]} == {shard.name}
    with pytest.raises(StateError, match="the model can't be loaded"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(StateError, match="the model can't be loaded"):
        load_model(folder)
    shard.write_bytes(whole)
    load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(StateError, match="tensors are missing, unknown or of another shape"):
        load_model(folder)


def test_a_pickle_is_not_loaded(tmp_path, tokenizer):
    folder = tmp_path / "out"
    model = written(folder, constants(), tokenizer)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(StateError, match="the model can't be loaded"):
        load_model(folder)
