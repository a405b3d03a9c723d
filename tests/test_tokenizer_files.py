"""A tokenizer is loaded only from all its files."""

import json
import re
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.stores.preprocess.tokenizing import RecordTokenizer
from tplr.tokenizer_files import pretrained_tokenizer


@pytest.mark.parametrize(
    ("kind", "vocabulary", "message"),
    [
        ("LlamaTokenizer", None, "only special tokens"),  # transformers gives a tokenizer of three tokens
        ("Qwen2Tokenizer", None, "only special tokens"),
        ("T5Tokenizer", None, "only special tokens"),
        ("PreTrainedTokenizerFast", None, "expected tokenizer.json"),
        ("PreTrainedTokenizerFast", "{}", "whole (KeyError"),
        (
            "PreTrainedTokenizerFast",
            '{"added_tokens": [], "model": {"type": "none"}}',
            "whole (Exception",
        ),
    ],
)
def test_a_tokenizer_without_all_its_files_is_refused(
    tmp_path: Path, kind: str, vocabulary: str | None, message: str
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    if vocabulary is not None:
        (folder / "tokenizer.json").write_text(vocabulary)
    with pytest.raises(ConfigError, match=f"--tokenizer 'tokenizer': its folder .*{re.escape(message)}"):
        pretrained_tokenizer("tokenizer", "--tokenizer", tmp_path)
    with pytest.raises(ConfigError, match=f"can't be loaded: .*{re.escape(message)}"):
        RecordTokenizer(folder)
