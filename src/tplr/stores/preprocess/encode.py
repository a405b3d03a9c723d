"""Encodes records to token ids and loss masks, a chunk at a time; engines distribute the chunks.

The result of a record depends only on the record, the config and the tokenizer, so chunks may have any size and run
anywhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tplr.errors import DataError
from tplr.stores.preprocess.chat import Message, NoMask, TextSpan, chat_spans
from tplr.stores.preprocess.columns import Column, column, cuts, slices, sums, take
from tplr.stores.preprocess.config import PipelineConfig, Section, SourceConfig
from tplr.stores.preprocess.records import Chunk, parsed
from tplr.stores.preprocess.tokenizing import RecordTokenizer

DEFAULT_DOMAIN = "__default__"
_MAX_EXACT = 2**53  # float64 holds every integer up to it


class UnusableRecord(DataError):
    """The record is left out. Counted by ``reason``; ``detail`` is logged."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass
class Draft:
    """A record before its texts are encoded: the lists of spans, or the numbers, of each key."""

    domain: str
    texts: dict[str, list[list[TextSpan]]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A chunk's usable records.

    Attributes:
        places: index in the chunk, one for each usable record.
        domains: one for each usable record.
        tokens: number of tokens of each, without masks.
        columns: all keys but ``position_ids``.
        skipped: index in the chunk, reason and detail of every other record.
        cut: number of tokens that ``max_seq_len`` cut off, one for each usable record.
    """

    places: npt.NDArray[np.int64]
    domains: list[str]
    tokens: npt.NDArray[np.int64]
    columns: dict[str, Column]
    skipped: list[tuple[int, str, str]]
    cut: npt.NDArray[np.int64]


class RecordEncoder:
    """Encodes chunks with one config and one tokenizer."""

    def __init__(self, config: PipelineConfig, tokenizing: RecordTokenizer) -> None:
        self._config = config
        self._tokenizing = tokenizing
        sections = config.input.sections
        sources = config.input.sources or {"sequence": SourceConfig(sections=sections or (), mask_key="loss_mask")}
        self._sources: Mapping[str, SourceConfig] = sources

    def encode(self, chunk: Chunk) -> Encoded:
        """Encode the usable records of a chunk, and collect the reasons for skipping the others."""
        drafts: list[tuple[int, Draft]] = []
        skipped: list[tuple[int, str, str]] = []
        for index, body in enumerate(chunk.bodies):
            try:
                drafts.append((index, self._draft(parsed(body))))
            except UnusableRecord as error:
                skipped.append((index, error.reason, str(error)))
            except DataError as error:
                skipped.append((index, "malformed record", str(error)))
        return self._encoded(drafts, skipped)

    def _encoded(self, drafts: list[tuple[int, Draft]], skipped: list[tuple[int, str, str]]) -> Encoded:
        columns: dict[str, Column] = {}
        tokens, cut = np.zeros(len(drafts), np.int64), np.zeros(len(drafts), np.int64)
        usable = np.ones(len(drafts), np.bool_)
        for key, source in self._sources.items():
            if source.is_value:
                stored = self._dtype(key)
                dtype = stored.name if stored.kind == "f" else "float64"
                numbers = [[np.array(draft.numbers[key], dtype)] for _, draft in drafts]
                columns[key] = column(numbers, nested=False, dtype=dtype)
                continue
            lists = [pieces for _, draft in drafts for pieces in draft.texts[key]]
            groups = cuts(len(draft.texts[key]) for _, draft in drafts)
            sequences = self._sequences(lists)
            # A rendered sequence of one token, or an empty list, has nothing to predict.
            short = np.diff(sequences.offsets) < (2 if source.sections[0].template else 1)
            usable &= sums(short, groups) == 0
            tokens += np.diff(sequences.offsets[groups])
            cut += sums(sequences.cut, groups)
            nested = groups if source.list_name else None
            columns[key] = Column(sequences.ids, sequences.offsets, nested)
            if mask_key := source.mask_of(key):
                columns[mask_key] = Column(sequences.mask, sequences.offsets, nested)
        places = np.array([index for index, _ in drafts], np.int64)
        domains = [draft.domain for _, draft in drafts]
        if not usable.all():
            skipped += [(int(index), "fewer than two tokens", "fewer than two tokens") for index in places[~usable]]
            kept = np.flatnonzero(usable)
            columns = {key: take(column, kept) for key, column in columns.items()}
            places, tokens, cut, domains = places[kept], tokens[kept], cut[kept], [domains[i] for i in kept]
        return Encoded(places, domains, tokens, columns, sorted(skipped), cut)

    def _dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype in which a key of numbers is stored."""
        return np.dtype(self._config.output.dtype.get(key, "float32"))

    # --- from a record to texts -------------------------------------------------------------------------------------

    def _draft(self, record: Mapping[str, Any]) -> Draft:
        domain = record.get(self._config.output.domain_key) if self._config.output.domain_key else None
        draft = Draft(domain if isinstance(domain, str) and domain else DEFAULT_DOMAIN)
        _check_unicode(draft.domain, f"in {self._config.output.domain_key!r}")
        own: list[TextSpan] = []  # of the record's text, without the elements of lists
        for key, source in self._sources.items():
            if source.is_value:
                draft.numbers[key] = _values(record, source.sections[0].field, self._dtype(key))
            elif source.list_name:
                elements = _field(record, source.list_name)
                if not isinstance(elements, list) or not elements:
                    raise UnusableRecord("field is not a list", f"{source.list_name!r} holds {type(elements).__name__}")
                draft.texts[key] = [self._spans(element, source.sections, continues=True) for element in elements]
            else:
                draft.texts[key] = [self._spans(record, source.sections)]
                own += draft.texts[key][0]
        characters = sum(len(span.text) for span in own)
        if own and characters < self._config.preprocessing.min_chars and all(span.train for span in own):
            raise UnusableRecord("fewer characters than min_chars")
        responses, rewards = draft.texts.get("responses"), draft.numbers.get("rewards")
        if responses is not None and rewards is not None and len(responses) != len(rewards):  # GRPO needs a pair each
            raise UnusableRecord("responses and rewards differ in number", f"{len(responses)} and {len(rewards)}")
        return draft

    def _spans(self, record: Any, sections: Sequence[Section], *, continues: bool = False) -> list[TextSpan]:
        """Return a sequence's spans; if it ``continues`` another, it gets no BOS and no special tokens by default."""
        pieces: list[TextSpan] = []
        for number, (template, group) in enumerate(groupby(sections, key=lambda section: section.template)):
            first = number == 0 and not continues
            if template:  # successive sections are one conversation
                if first and (bos := self._tokenizing.bos_token):
                    pieces.append(TextSpan(bos, train=False))
                pieces += self._chat(record, [*group], continues=number == 0 and continues)
                continue
            for section in group:
                value = _value(record, section)
                if not isinstance(value, str):
                    raise UnusableRecord("field is not text", f"{section.field!r} holds {type(value).__name__}")
                special = first if section.add_special_tokens is None else section.add_special_tokens
                pieces.append(TextSpan(value, section.action == "train", special))
                first = False
        self._check_text(pieces)
        return pieces

    def _check_text(self, pieces: Sequence[TextSpan]) -> None:
        blank, trained, characters = True, True, 0
        for piece in pieces:
            text = piece.text
            blank = blank and (not text or text.isspace())
            trained = trained and piece.train
            characters += len(text)
            if not text.isascii():
                _check_unicode(text, "in the text")
        if blank:
            raise UnusableRecord("blank")
        if trained and characters > self._config.preprocessing.max_chars:
            raise UnusableRecord("more characters than max_chars")

    def _chat(self, record: Any, sections: Sequence[Section], *, continues: bool) -> list[TextSpan]:
        """Return a conversation's spans. If it ``continues`` another, it is rendered as the answer to a question."""
        messages: list[Message] = []
        train: list[bool] = []
        config = self._config
        by_role = "mask" in (config.mask_default, *config.mask.values())
        everything = all(
            section.action == "train" or (section.action == "$role" and not by_role) for section in sections
        )
        for section in sections:
            for message in _messages(_value(record, section), section):
                verdict = section.action
                if verdict == "$role":
                    verdict = config.mask.get(message["role"], config.mask_default)
                messages.append(message)
                train.append(verdict == "train")
        context = [{"role": "user", "content": "?"}] if continues and messages[0]["role"] == "assistant" else []
        try:
            return chat_spans(self._tokenizing, messages, None if everything and not context else train, context)
        except NoMask as error:
            raise UnusableRecord("conversation whose trained part the chat template omits", str(error)) from error
        except DataError as error:
            raise UnusableRecord("conversation that the chat template rejects", str(error)) from error

    # --- from texts to ids ------------------------------------------------------------------------------------------

    def _sequences(self, lists: Sequence[Sequence[TextSpan]]) -> "Sequences":
        """Encodes all texts at once; adds EOS and truncates with array operations."""
        settings = self._config.preprocessing
        pieces = [piece for one in lists for piece in one]
        rows = self._tokenizing.encode([piece.text for piece in pieces], [piece.special for piece in pieces])
        offsets = rows.offsets[cuts(map(len, lists))]
        trained = np.array([piece.train for piece in pieces], np.bool_)
        ids, mask = rows.ids, np.ones(len(rows.ids), np.bool_) if trained.all() else np.repeat(trained, rows.lengths)
        if partly := [i for i, piece in enumerate(pieces) if piece.ranges]:
            ranges = [pieces[i].ranges for i in partly]
            tokens = self._tokenizing.trained_tokens([pieces[i].text for i in partly], ranges)
            for i, inside in zip(partly, tokens, strict=True):
                mask[rows.offsets[i] : rows.offsets[i + 1]] = inside
        if settings.append_eos:
            full = np.flatnonzero(np.diff(offsets))
            last = offsets[full + 1] - 1
            lacking = ids[last] != self._tokenizing.eos
            ids = np.insert(ids, last[lacking] + 1, self._tokenizing.eos)
            mask = np.insert(mask, last[lacking] + 1, mask[last[lacking]])
            added = np.zeros(len(lists), np.int64)
            added[full[lacking]] = 1
            offsets = offsets + cuts(added)
        cut = np.maximum(np.diff(offsets) - settings.max_seq_len, 0)
        if cut.any():
            first = cut if settings.truncation_mode == "keep_end" else np.zeros_like(cut)
            kept, lengths = offsets[:-1] + first, np.diff(offsets) - cut
            ids, mask, offsets = slices(ids, kept, lengths), slices(mask, kept, lengths), cuts(lengths)
        return Sequences(ids, mask, offsets, cut)


class Sequences(NamedTuple):
    """Ids and mask of several sequences, their offsets, and the number of tokens cut off each."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    cut: npt.NDArray[np.int64]


def _field(record: Mapping[str, Any], name: str) -> Any:
    if record.get(name) is None:  # a parquet row has every column
        raise UnusableRecord("missing field", repr(name))
    return record[name]


def _value(record: Any, section: Section) -> Any:
    # An element of a list may be the plain value itself.
    return _field(record, section.field) if isinstance(record, Mapping) else record


def _messages(value: Any, section: Section) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant" if section.action == "train" else "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UnusableRecord("field is not a list of messages", f"{section.field!r} holds {type(value).__name__}")
    for message in value:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise UnusableRecord("message without a role", f"in {section.field!r}")
    return value


def _values(record: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> list[float]:
    value = _field(record, name)
    values = value if isinstance(value, list) else [value]
    if not values or not all(
        type(number) is int or (type(number) is float and math.isfinite(number)) for number in values
    ):
        raise UnusableRecord("field is not a finite number or a list of finite numbers", f"{name!r}")
    if any(type(number) is int and abs(number) > _MAX_EXACT for number in values):
        raise UnusableRecord("integer beyond 2**53", f"{name!r}")
    if dtype.kind in "fiu":
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        if min(values) < float(limits.min) or max(values) > float(limits.max):
            raise UnusableRecord("number out of range of its dtype", f"{name!r} holds a value out of range for {dtype}")
    return [float(number) for number in values]


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRecord("lone surrogate, which UTF-8 can't encode", f"{where}, at {error.start}") from error
