"""Tokenizes raw JSON Lines while a store loads them, for data that fits into memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tplr.errors import ConfigError
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import RecordEncoder, UnusableRecord
from tplr.stores.preprocess.records import Chunk
from tplr.stores.preprocess.shards import shard_columns
from tplr.stores.preprocess.tokenizing import RecordTokenizer
from tplr.stores.writer import records_of

_MESSAGES = {"field": "messages", "template": True, "action": "$role"}
_PROMPT = {"field": "prompt", "template": True, "action": "mask"}

# The layout of records of each train type if there is no config.
DEFAULT_INPUTS: Mapping[str, Mapping[str, Any]] = {
    "seq": {"sections": [{"field": "text"}]},
    "sft": {"sections": [_MESSAGES]},
    "dpo": {
        "sources": {
            side: {"sections": [_PROMPT, {"field": side, "template": True, "action": "train"}]}
            for side in ("chosen", "rejected")
        }
    },
    "grpo": {
        "sources": {
            "prompts": {"sections": [_PROMPT], "mask_key": None},
            "responses": {
                "list_field": "responses",
                "sections": [{"field": "response", "template": True, "action": "train"}],
                "mask_key": "masks",
            },
            "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
        }
    },
}


def raw_transform(
    train_type: str, config_path: Path, tokenizer_path: str | Path | None, max_len: int
) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
    """Return the transform for ``JsonlStore``, by the config at ``config_path`` or the default for ``train_type``.

    Args:
        tokenizer_path: default: the config's folder.
        max_len: maximum number of tokens of a sequence.

    Raises:
        ConfigError: the config or the tokenizer is not usable.
    """
    if config_path.exists():
        config = PipelineConfig.from_file(config_path)
    else:
        config = default_config(train_type, max_seq_len=max_len, min_chars=0)
    if config.preprocessing.packing_strategy != "simple":
        raise ConfigError(
            f"{config_path}: packing_strategy: raw records are not packed while they are loaded; use simple"
        )
    transform = _RawTransform(config, tokenizer_path or config_path.parent)
    transform.tokenizing.check(config)
    return transform


@dataclass(frozen=True)
class _RawTransform:
    """Tokenizes one record. A pickled copy, as in a loader's worker, opens the tokenizer again when it is called."""

    config: PipelineConfig
    tokenizer_path: str | Path

    @cached_property
    def tokenizing(self) -> RecordTokenizer:
        return RecordTokenizer(self.tokenizer_path)

    @cached_property
    def encoder(self) -> RecordEncoder:
        return RecordEncoder(self.config, self.tokenizing)

    def __reduce__(self) -> tuple[object, ...]:
        return _RawTransform, (self.config, self.tokenizer_path)

    def __call__(self, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if "prompt" not in record and "input" in record:
            record = {**record, "prompt": record["input"]}
        encoded = self.encoder.encode(Chunk("", 0, [record], [0], [0]))
        if encoded.skipped:
            raise UnusableRecord(*encoded.skipped[0][1:])
        columns, _ = shard_columns(encoded.columns, self.config)
        return next(records_of(columns))


def default_config(train_type: str, **preprocessing: Any) -> PipelineConfig:
    """The config for records in the default layout of ``train_type``."""
    verdicts = {"system": "mask", "user": "mask", "assistant": "train"}
    return PipelineConfig.from_dict(
        {
            "input": DEFAULT_INPUTS[train_type],
            "mask": verdicts,
            "preprocessing": preprocessing,
            "output": {"position_ids_mode": "doc_reset"},
        }
    )
