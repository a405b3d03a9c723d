"""The tokenizer of a preparation: encodes texts with or without special tokens, renders conversations."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tplr.errors import ConfigError, DataError
from tplr.seeds import derive
from tplr.stores.preprocess.columns import cuts, slices
from tplr.stores.preprocess.config import PipelineConfig
from tplr.tokenize import Encoder, Ragged, encoder
from tplr.tokenizer_files import read_tokenizer

Ranges = tuple[tuple[int, int], ...]  # of characters: begin, end

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RecordTokenizer:
    """A tokenizer of ``transformers`` in a local folder.

    Raises:
        ConfigError: the folder has no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_dir():  # a name would be looked up on the web
            raise ConfigError(f"tokenizer {path}: can't be loaded: no such folder; expected one with tokenizer.json")
        self.template_name = f"the chat template of {path}"
        try:
            self._tokenizer = read_tokenizer(Path(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer {path}: can't be loaded: {str(error).splitlines()[0]}") from error
        if not isinstance(getattr(self._tokenizer, "backend_tokenizer", None), Tokenizer):
            raise ConfigError(f"tokenizer {path}: {type(self._tokenizer).__name__} has no tokenizer.json")

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines ids, and of the chat template."""
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

        return encoder(PreTrainedTokenizerFast(tokenizer_object=self._bare))

    @cached_property
    def _bare(self) -> Tokenizer:
        definition = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(
            json.dumps({**definition, "post_processor": None, "truncation": None, "padding": None})
        )

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

    def trained_tokens(self, texts: Sequence[str], ranges: Sequence[Ranges]) -> list[npt.NDArray[np.bool_]]:
        """For each text, encoded without special tokens: which tokens hold a character of its ranges."""
        rows = self._bare.encode_batch(list(texts), add_special_tokens=False)
        return [_inside(np.array(row.offsets).reshape(-1, 2), spans) for row, spans in zip(rows, ranges, strict=True)]

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        """A conversation through the chat template, without a BOS that the template begins every text with.

        Args:
            prompt: end with the header of the assistant's next message.

        Raises:
            DataError: the template refuses the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"{self.template_name}: {type(error).__name__}: {error}") from error
        return text.removeprefix(self.bos_token) if self.bos_token else text

    def generated(self, messages: Sequence[Mapping[str, Any]]) -> Ranges:
        """The ranges of ``render(messages)`` that the template marks with ``{% generation %}``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template()
        if not _MARKER.search(template):
            return ()
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        rendered: Any = render_jinja_template(
            [plain], chat_template=template, return_assistant_tokens_mask=True, **self._tokenizer.special_tokens_map
        )
        (text,), (ranges,) = rendered
        bos = len(self.bos_token) if self.bos_token and text.startswith(self.bos_token) else 0
        return tuple((begin - bos, end - bos) for begin, end in ranges)


def _inside(offsets: npt.NDArray[np.int64], ranges: Ranges) -> npt.NDArray[np.bool_]:
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    inside = np.zeros(len(offsets), np.bool_)
    for begin, end in ranges:
        inside |= (begins < end) & (ends > begin)
    return inside
