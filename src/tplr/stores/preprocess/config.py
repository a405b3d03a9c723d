"""``PipelineConfig``: all settings of a preparation, as a validated JSON file.

::

    {"version": 1,
     "input": {"sections": [{"field": "messages", "template": true, "action": "$role"}]},
     "mask": {"assistant": "train"}, "mask_default": "mask",
     "preprocessing": {"max_seq_len": 2048, "packing_strategy": "bfd"},
     "output": {"storage_format": "bin", "max_tokens_per_shard": 100000000}}

Either ``sections``, the successive parts of one sequence, or ``sources``, which gives sections for each key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tplr.errors import ConfigError
from tplr.files import atomic_write
from tplr.stores.detect import StoreFormat
from tplr.stores.meta import DTYPES

MaskRule = Literal["train", "mask"]
Action = Literal["train", "mask", "$role", "value"]
Packing = Literal["simple", "bfd", "bfd_split"]
Truncation = Literal["keep_start", "keep_end"]
PositionIds = Literal["none", "doc_reset", "continuous"]

_Positive = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Section(_Strict):
    """A part of a sequence, from one field of a record.

    Attributes:
        action: ``train`` or ``mask`` its tokens; ``$role``: look up each message's role in ``mask``; ``value``: the
            field holds numbers, not tokens.
        template: the field holds messages (or one text), to be rendered by the tokenizer's chat template.
        add_special_tokens: add the tokenizer's special tokens to this section; default: only to a sequence's first
            section, and only if it is no template.
    """

    field: str = Field(min_length=1)
    action: Action = "train"
    template: bool = False
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.action == "$role" and not self.template:
            raise ValueError("action $role needs template: true, as only messages have roles")
        if self.action == "value" and self.template:
            raise ValueError("action value takes numbers: leave template out")
        return self


class SourceConfig(_Strict):
    """One key of the store.

    Attributes:
        list_field: a field that holds a list. The sections are built from each of its elements: an object, or a plain
            value that stands for every section's ``field``. True: the ``field`` of the only section.
        mask_key: the key of its loss mask, None for no mask; default ``<key>_mask``.
    """

    sections: tuple[Section, ...] = Field(min_length=1)
    list_field: str | bool | None = None
    mask_key: str | None = None

    @property
    def is_value(self) -> bool:
        """Whether it yields numbers instead of tokens."""
        return self.sections[0].action == "value"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_value and (len(self.sections) > 1 or self.list_field):
            raise ValueError("a value is one section without list_field")
        if self.list_field is True and len(self.sections) > 1:
            raise ValueError("list_field true needs a single section, whose field holds the list; else name the field")
        if any(section.action == "value" for section in self.sections[1:]):
            raise ValueError("action value can't follow other sections")
        return self

    @property
    def list_name(self) -> str | None:
        """The field of a record that holds its list; None if each record is one sequence."""
        return self.sections[0].field if self.list_field is True else self.list_field or None

    def mask_of(self, key: str) -> str | None:
        """The key of this source's mask; None if it has none."""
        if self.is_value:
            return None
        return self.mask_key if "mask_key" in self.model_fields_set else f"{key}_mask"


class Input(_Strict):
    """The input of sequences: exactly one of ``sections`` and ``sources``."""

    sections: tuple[Section, ...] | None = None
    sources: dict[str, SourceConfig] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sections) == bool(self.sources):
            raise ValueError("expected either sections or sources, and at least one of them")
        for section in self.sections or ():
            if section.action == "value":
                raise ValueError("action value: values need a key of their own, so use sources")
        names = [name for key, source in (self.sources or {}).items() for name in (key, source.mask_of(key)) if name]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"keys given twice: {', '.join(twice)}")
        return self


class Preprocessing(_Strict):
    """Settings for building sequences from records.

    Attributes:
        max_seq_len: most tokens of a document, or of a list of a source; the rest is cut off.
        min_chars: limit for the text of a record that is trained on completely; shorter ones are left out. Elements of
            a ``list_field`` are not counted, and a record of nothing else has no limit.
        max_chars: limit for each sequence that is trained on completely; records with longer ones are left out.
        max_items: number of records to use; None for all.
        packing_strategy: ``simple``: documents in input order; ``bfd``: best-fit decreasing, within a shard, into
            sequences of up to ``max_packed_len``; ``bfd_split``: the same, after splitting longer documents.
        max_packed_len: in tokens; longer documents are cut off, or with ``bfd_split`` split.
        truncation_mode: which end is kept when tokens are cut off.
        append_eos: end every document with the tokenizer's EOS, unless it ends with it already. EOS is trained on if
            the previous token is.
    """

    max_seq_len: _Positive = 2048
    min_chars: Annotated[int, Field(ge=0)] = 50
    max_chars: _Positive = 2_000_000
    max_items: _Positive | None = None
    packing_strategy: Packing = "simple"
    max_packed_len: _Positive = 8192
    truncation_mode: Truncation = "keep_start"
    append_eos: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is above max_chars {self.max_chars}")
        return self


class Output(_Strict):
    """Settings for writing the store.

    Attributes:
        domain_key: field whose text names the folder of a record; records without it go to ``__default__``.
        max_tokens_per_shard: shards are written when all domains together hold this many tokens.
        dtype: dtype by key; default: int32 for tokens, bool for masks, float32 for values.
        position_ids_mode: ``doc_reset``: from 0 in each document; ``continuous``: from 0 in each packed sequence, or in
            each shard with ``simple``, which packs a shard into one sequence; ``none``: no such key.
    """

    domain_key: str | None = None
    storage_format: StoreFormat = "bin"
    max_tokens_per_shard: _Positive = 100_000_000
    dtype: dict[str, str] = Field(default_factory=dict)
    position_ids_mode: PositionIds = "doc_reset"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, dtype in self.dtype.items():
            if dtype not in DTYPES:
                raise ValueError(f"dtype of {key}: {dtype!r} is not one of {', '.join(DTYPES)}")
        return self


class PipelineConfig(_Strict):
    """The whole file.

    Attributes:
        mask: whether messages are trained on, by role; ``mask_default`` applies to other roles.
    """

    version: Literal[1] = 1
    input: Input
    mask: dict[str, MaskRule] = Field(default_factory=dict)
    mask_default: MaskRule = "mask"
    preprocessing: Preprocessing = Preprocessing()
    output: Output = Output()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.input.sources and self.preprocessing.packing_strategy != "simple":
            raise ValueError(
                f"preprocessing.packing_strategy {self.preprocessing.packing_strategy}: records with sources stay "
                "whole; use simple"
            )
        if unknown := [key for key in self.output.dtype if key not in self.keys]:
            raise ValueError(f"output.dtype: no key {', '.join(unknown)}; keys are {', '.join(self.keys)}")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the store."""
        if self.input.sources:
            pairs = [(key, source.mask_of(key)) for key, source in self.input.sources.items()]
            return tuple(name for pair in pairs for name in pair if name)
        positions = () if self.output.position_ids_mode == "none" else ("position_ids",)
        return ("sequence", "loss_mask", *positions)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "config") -> Self:
        """Check plain values.

        Raises:
            ConfigError: lists every key that is unknown, missing or wrong.
        """
        try:
            # As JSON: strict mode then accepts lists for tuples, and no other conversion.
            return cls.model_validate_json(json.dumps(value))
        except (ValidationError, TypeError) as error:
            raise ConfigError(_problems(where, error)) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, including the defaults."""
        value = self.model_dump(mode="json")
        for key, source in (self.input.sources or {}).items():
            if "mask_key" not in source.model_fields_set:
                del value["input"]["sources"][key]["mask_key"]
        return value

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a JSON file. Raises ConfigError as ``from_dict``, or if there is no such file."""
        path = Path(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config: can't read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"config: {path} is not JSON: {error}") from error
        return cls.from_dict(value, str(path))

    def to_file(self, path: str | Path) -> None:
        """Write a JSON file that ``from_file`` reads back."""
        atomic_write(Path(path), json.dumps(self.to_dict(), indent=2).encode())


def _problems(where: str, error: ValidationError | TypeError) -> list[str]:
    if isinstance(error, TypeError):
        return [f"{where}: {error}"]
    return [
        f"{where}: {'.'.join(map(str, one['loc'])) or 'the file'}: {_says(one['type'], one['msg'])}"
        for one in error.errors()
    ]


def _says(kind: str, message: str) -> str:
    return {"extra_forbidden": "unknown key; remove it or fix its spelling", "missing": "is missing"}.get(kind, message)
