"""Configs as files: errors are named, and valid configs survive a round trip."""

import json
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.stores.preprocess.config import PipelineConfig

SECTIONS = {"sections": [{"field": "text"}]}
SOURCES = {
    "prompts": {"sections": [{"field": "prompt", "action": "mask"}], "mask_key": None},
    "responses": {"sections": [{"field": "response"}], "list_field": "responses", "mask_key": "masks"},
    "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
}


def test_the_documented_defaults() -> None:
    config = PipelineConfig.from_dict({"input": SECTIONS})
    knobs, output = config.preprocessing, config.output
    assert (config.version, config.mask, config.mask_default) == (1, {}, "mask")
    assert (knobs.max_seq_len, knobs.min_chars, knobs.max_chars, knobs.max_items) == (2048, 50, 2_000_000, None)
    assert (knobs.packing_strategy, knobs.max_packed_len, knobs.truncation_mode) == ("simple", 8192, "keep_start")
    assert (output.domain_key, output.storage_format, output.max_tokens_per_shard) == (None, "bin", 100_000_000)
    assert (output.dtype, output.position_ids_mode) == ({}, "doc_reset")
    assert config.keys == ("sequence", "loss_mask", "position_ids")


def test_round_trips(tmp_path: Path) -> None:
    config = PipelineConfig.from_dict({
        "input": {"sources": SOURCES},
        "preprocessing": {"max_seq_len": 7, "min_chars": 0},
        "output": {"dtype": {"rewards": "float64"}, "storage_format": "h5"},
    })  # fmt: skip
    assert config.keys == ("prompts", "responses", "masks", "rewards")
    assert PipelineConfig.from_dict(config.to_dict()) == config
    config.to_file(tmp_path / "c.json")
    again = PipelineConfig.from_file(tmp_path / "c.json")
    assert again == config
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(("given", "name"), [("answers", "answers"), (True, "response"), (False, None), (None, None)])
def test_list_fields(given: str | bool | None, name: str | None) -> None:
    sources = {"responses": {**SOURCES["responses"], "list_field": given}}
    config = PipelineConfig.from_dict({"input": {"sources": sources}})
    assert config.input.sources
    assert config.input.sources["responses"].list_name == name
    assert PipelineConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": {}}, "inputs: unknown key; remove it or fix its spelling"),
        ({"input": {}}, "either sections or sources"),
        ({"input": {**SECTIONS, "sources": SOURCES}}, "either sections or sources"),
        ({"input": {"sections": [{"fields": "x"}]}}, "input.sections.0.field: is missing"),
        ({"input": {"sections": [{"field": "x", "action": "skip"}]}}, "input.sections.0.action: Input should be"),
        ({"input": {"sections": [{"field": "x", "action": "$role"}]}}, "needs template: true"),
        ({"input": {"sections": [{"field": "x", "action": "value"}]}}, "values need a key of their own"),
        ({"input": {"sources": {"a": SOURCES["prompts"], "masks": SOURCES["responses"]}}}, "keys given twice: masks"),
        (
            {"input": {"sources": {"a": {"sections": [{"field": "x"}, {"field": "y"}], "list_field": True}}}},
            "list_field true needs a single section",
        ),
        ({"preprocessing": {"max_seq_len": 0}}, "preprocessing.max_seq_len: Input should be greater than 0"),
        ({"preprocessing": {"max_seq_len": "9"}}, "max_seq_len: Input should be a valid integer"),
        ({"preprocessing": {"min_chars": 9, "max_chars": 3}}, "min_chars 9 is above max_chars 3"),
        ({"preprocessing": {"packing_strategy": "best"}}, "packing_strategy: Input should be 'simple', 'bfd'"),
        ({"input": {"sources": SOURCES}, "preprocessing": {"packing_strategy": "bfd"}}, "records with sources stay"),
        ({"output": {"dtype": {"sequence": "int31"}}}, "'int31' is not one of"),
        ({"output": {"dtype": {"sequences": "int32"}}}, "no key sequences; keys are sequence"),
        ({"output": {"storage_format": "zip"}}, "output.storage_format"),
        ({"mask": {"user": "hide"}}, "mask.user"),
        ({"version": 2}, "version"),
    ],
)
def test_every_mistake_is_named(change: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.from_dict({"input": SECTIONS} | change, "c.json")
    assert says in str(caught.value)
    assert str(caught.value).startswith("c.json: ")


def test_all_mistakes_at_once_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.from_dict({"input": SECTIONS, "preprocessing": {"max_seq_len": 0, "min_chars": -1, "x": 1}})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="can't read"):
        PipelineConfig.from_file(tmp_path / "none.json")
    (tmp_path / "half.json").write_text(json.dumps({"input": SECTIONS})[:-3])
    with pytest.raises(ConfigError, match="is not JSON"):
        PipelineConfig.from_file(tmp_path / "half.json")
