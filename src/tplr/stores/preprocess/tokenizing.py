"""The tokenizer of a preparation: encodes texts with or without special tokens, renders messages."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tplr.errors import ConfigError, DataError
from tplr.seeds import derive
from tplr.stores.preprocess.columns import cuts, slices
from tplr.stores.preprocess.config import PipelineConfig
from tplr.tokenize import Encoder, Ragged, encoder


class RecordTokenizer:
    """A tokenizer of ``transformers`` in a local folder.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), use_fast=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer {path}: can't be loaded: {str(error).splitlines()[0]}") from error
        if not isinstance(getattr(self._tokenizer, "backend_tokenizer", None), Tokenizer):
            raise ConfigError(f"tokenizer {path}: {type(self._tokenizer).__name__} has no tokenizer.json")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides ids, and of the chat template."""
        template = self._tokenizer.chat_template
        return f"{self._with_special.fingerprint}-{derive(json.dumps(template)):016x}"

    def check(self, config: PipelineConfig) -> None:
        """Raise ConfigError if the config needs an EOS or a chat template that this tokenizer lacks."""
        if config.preprocessing.append_eos:
            _ = self.eos
        sources = config.input.sources or {}
        sections = [*(config.input.sections or ()), *(part for source in sources.values() for part in source.sections)]
        if any(section.template for section in sections) and self._tokenizer.chat_template is None:
            raise ConfigError("a section has template: true, and the tokenizer has no chat template")

    @property
    def bos_token(self) -> str | None:
        """The text of BOS."""
        return self._tokenizer.bos_token

    @property
    def eos(self) -> int:
        """Id of EOS. Raises ConfigError if there is none."""
        if self._tokenizer.eos_token_id is None:
            raise ConfigError("append_eos: the tokenizer has no EOS token")
        return self._tokenizer.eos_token_id

    @cached_property
    def _with_special(self) -> Encoder:
        return encoder(self._tokenizer)

    @cached_property
    def _without_special(self) -> Encoder:
        from transformers import PreTrainedTokenizerFast

        definition = json.loads(self._tokenizer.backend_tokenizer.to_str())
        bare = Tokenizer.from_str(json.dumps({**definition, "post_processor": None}))
        return encoder(PreTrainedTokenizerFast(tokenizer_object=bare))

    def encode(self, texts: Sequence[str], special: Sequence[bool]) -> Ragged:
        """Ids of each text, not truncated, with or without the tokenizer's special tokens. Uses all cores."""
        if not texts:
            return Ragged.of([])
        if all(special):
            return self._with_special.encode_batch(texts)
        if not any(special):
            return self._without_special.encode_batch(texts)
        framed, bare = np.flatnonzero(special).tolist(), np.flatnonzero(~np.asarray(special)).tolist()
        both = Ragged.join(
            [
                self._with_special.encode_batch([texts[i] for i in framed]),
                self._without_special.encode_batch([texts[i] for i in bare]),
            ]
        )
        order = np.argsort([*framed, *bare])
        lengths = both.lengths[order]
        return Ragged(slices(both.ids, both.offsets[order], lengths), cuts(lengths))

    def render(self, message: Mapping[str, Any]) -> str:
        """One message through the chat template, without a BOS that the template begins every text with.

        Raises:
            DataError: the template refuses the message.
        """
        try:
            text = self._tokenizer.apply_chat_template([message], tokenize=False)
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"{type(error).__name__}: {error}") from error
        return text.removeprefix(self.bos_token) if self.bos_token else text
