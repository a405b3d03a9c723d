"""Records to token ids and loss masks, a chunk at a time: the work that all engines share out.

What comes out of a record depends on nothing but the record, the config and the tokenizer, so chunks may be cut
anywhere and worked on anywhere.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.data.preprocess.columns import Column, column
from tplr.data.preprocess.config import PipelineConfig, Section, Source
from tplr.data.preprocess.records import Chunk, parsed
from tplr.data.preprocess.tokenizing import Tokenizing
from tplr.errors import DataError

DEFAULT_DOMAIN = "__default__"

Ids = npt.NDArray[np.int32]


class Unusable(DataError):
    """Why a record is left out. ``reason`` is the same for all records of one kind, and what is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True)
class Piece:
    """A text that is all trained on, or all masked. ``special``: with the tokenizer's special tokens."""

    text: str
    train: bool
    special: bool = False


@dataclass
class Draft:
    """A record before its texts are encoded: for each key its lists of pieces, or of numbers."""

    domain: str
    texts: dict[str, list[list[Piece]]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A chunk's usable records.

    Attributes:
        places: index in the chunk of each of them.
        domains: of each of them.
        tokens: of each of them, masks not counted.
        columns: their keys but ``position_ids``, each with as many records.
        skipped: index in the chunk, reason and detail of every other record.
        cut: tokens that ``max_seq_len`` cut off, of each.
    """

    places: npt.NDArray[np.int64]
    domains: list[str]
    tokens: npt.NDArray[np.int64]
    columns: dict[str, Column]
    skipped: list[tuple[int, str, str]]
    cut: npt.NDArray[np.int64]


class Encoder:
    """Encodes chunks by one config and one tokenizer."""

    def __init__(self, config: PipelineConfig, tokenizing: Tokenizing) -> None:
        self._config = config
        self._tokenizing = tokenizing
        sections = config.input.sections
        sources = config.input.sources or {"sequence": Source(sections=sections or (), mask_key="loss_mask")}
        self._sources: Mapping[str, Source] = sources

    def encode(self, chunk: Chunk) -> Encoded:
        """The usable records of a chunk; every other one is named with the reason."""
        drafts: list[tuple[int, Draft]] = []
        skipped: list[tuple[int, str, str]] = []
        for index, raw in enumerate(chunk.records):
            try:
                drafts.append((index, self._draft(parsed(raw.body))))
            except Unusable as error:
                skipped.append((index, error.reason, str(error)))
            except DataError as error:
                skipped.append((index, "malformed record", str(error)))
        return self._encoded(drafts, skipped)

    def _encoded(self, drafts: list[tuple[int, Draft]], skipped: list[tuple[int, str, str]]) -> Encoded:
        rows = self._rows(pieces for _, draft in drafts for lists in draft.texts.values() for pieces in lists)
        made, cut = [], Counter[int]()
        for index, draft in drafts:
            record: dict[str, list[npt.NDArray[Any]]] = {}
            for key, lists in draft.texts.items():
                found = [next(rows) for _ in lists]
                cut[index] += sum(dropped for _, _, dropped in found)
                record[key] = [ids for ids, _, _ in found]
                if mask_key := self._sources[key].mask_of(key):
                    record[mask_key] = [mask for _, mask, _ in found]
            record |= {key: [np.array(values, np.float32)] for key, values in draft.numbers.items()}
            if reason := self._too_short(record, draft):
                skipped.append((index, reason, reason))
            else:
                made.append((index, draft, record))
        nested = {
            name for key, source in self._sources.items() if source.list_field for name in (key, source.mask_of(key))
        }
        keys = [key for key in self._config.keys if key != "position_ids"]
        return Encoded(
            places=np.array([index for index, _, _ in made], np.int64),
            domains=[draft.domain for _, draft, _ in made],
            tokens=np.array(
                [sum(len(ids) for key in draft.texts for ids in record[key]) for _, draft, record in made], np.int64
            ),
            columns={
                key: column([record[key] for _, _, record in made], nested=key in nested, dtype=self._dtype(key))
                for key in keys
            },
            skipped=sorted(skipped),
            cut=np.array([cut[index] for index, _, _ in made], np.int64),
        )

    def _dtype(self, key: str) -> str:
        if key in self._sources:
            return "float32" if self._sources[key].is_value else "int32"
        return "bool"

    def _too_short(self, record: Mapping[str, Sequence[npt.NDArray[Any]]], draft: Draft) -> str | None:
        """Nothing can be predicted in a rendered sequence of one token, nor in an empty list."""
        for key in draft.texts:
            shortest = min((len(ids) for ids in record[key]), default=0)
            if shortest == 0 or (shortest == 1 and self._sources[key].sections[0].template):
                return "fewer than two tokens"
        return None

    # --- from a record to texts -------------------------------------------------------------------------------------

    def _draft(self, record: Mapping[str, Any]) -> Draft:
        domain = record.get(self._config.output.domain_key) if self._config.output.domain_key else None
        draft = Draft(domain if isinstance(domain, str) and domain else DEFAULT_DOMAIN)
        for key, source in self._sources.items():
            if source.is_value:
                draft.numbers[key] = _numbers(record, source.sections[0].field)
            elif source.list_field:
                elements = _field(record, source.list_field)
                if not isinstance(elements, list) or not elements:
                    raise Unusable("field is no list", f"{source.list_field!r} holds {type(elements).__name__}")
                draft.texts[key] = [self._pieces(element, source.sections, continues=True) for element in elements]
            else:
                draft.texts[key] = [self._pieces(record, source.sections)]
        return draft

    def _pieces(self, record: Any, sections: Sequence[Section], *, continues: bool = False) -> list[Piece]:
        """The pieces of one sequence; one that ``continues`` another gets no BOS and no special tokens by default."""
        pieces: list[Piece] = []
        for number, section in enumerate(sections):
            # An element of a list may be the plain value itself.
            value = _field(record, section.field) if isinstance(record, Mapping) else record
            first = number == 0 and not continues
            if section.template:
                if first and (bos := self._tokenizing.bos_token):
                    pieces.append(Piece(bos, train=False))
                pieces += self._messages(value, section)
            elif not isinstance(value, str):
                raise Unusable("field is no text", f"{section.field!r} holds {type(value).__name__}")
            else:
                special = first if section.add_special_tokens is None else section.add_special_tokens
                pieces.append(Piece(value, section.action == "train", special))
        self._check_text(pieces)
        return pieces

    def _check_text(self, pieces: Sequence[Piece]) -> None:
        if all(not piece.text or piece.text.isspace() for piece in pieces):
            raise Unusable("blank")
        for piece in pieces:
            if not piece.text.isascii():
                _check_unicode(piece.text)
        knobs = self._config.preprocessing
        if all(piece.train for piece in pieces):
            characters = sum(len(piece.text) for piece in pieces)
            if characters < knobs.min_chars:
                raise Unusable("fewer characters than min_chars")
            if characters > knobs.max_chars:
                raise Unusable("more characters than max_chars")

    def _messages(self, value: Any, section: Section) -> Iterator[Piece]:
        """Each message rendered alone, so that each can be masked alone."""
        if isinstance(value, str):
            value = [{"role": "assistant" if section.action == "train" else "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise Unusable("field is no list of messages", f"{section.field!r} holds {type(value).__name__}")
        for message in value:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                raise Unusable("message without a role", f"in {section.field!r}")
            verdict = section.action
            if verdict == "$role":
                verdict = self._config.mask.get(message["role"], self._config.mask_default)
            try:
                yield Piece(self._tokenizing.render(message), verdict == "train")
            except DataError as error:
                raise Unusable("message that the chat template refuses", str(error)) from error

    # --- from texts to ids ------------------------------------------------------------------------------------------

    def _rows(self, lists: Iterator[list[Piece]]) -> Iterator[tuple[Ids, npt.NDArray[np.bool_], int]]:
        """Ids, mask, and the number of tokens cut off, of each list of pieces; all texts are encoded at once."""
        whole = [*lists]
        pieces = [piece for one in whole for piece in one]
        ids: list[Ids] = [np.empty(0, np.int32)] * len(pieces)
        for special in (False, True):
            chosen = [i for i, piece in enumerate(pieces) if piece.special is special]
            for i, row in zip(chosen, self._tokenizing.encode([pieces[i].text for i in chosen], special), strict=True):
                ids[i] = row
        encoded = iter(ids)
        return (self._sequence(one, [next(encoded) for _ in one]) for one in whole)

    def _sequence(self, pieces: Sequence[Piece], ids: Sequence[Ids]) -> tuple[Ids, npt.NDArray[np.bool_], int]:
        knobs = self._config.preprocessing
        tokens = ids[0] if len(ids) == 1 else np.concatenate(ids)
        mask = np.repeat([piece.train for piece in pieces], [len(row) for row in ids])
        if knobs.append_eos and len(tokens) and tokens[-1] != self._tokenizing.eos:
            tokens, mask = np.append(tokens, np.int32(self._tokenizing.eos)), np.append(mask, mask[-1])
        cut = max(0, len(tokens) - knobs.max_seq_len)
        if cut:
            kept = slice(cut, None) if knobs.truncation_mode == "keep_end" else slice(knobs.max_seq_len)
            tokens, mask = tokens[kept], mask[kept]
        return tokens, mask, cut


def _field(record: Mapping[str, Any], name: str) -> Any:
    if record.get(name) is None:  # a parquet row has every column
        raise Unusable("missing field", repr(name))
    return record[name]


def _numbers(record: Mapping[str, Any], name: str) -> list[float]:
    value = _field(record, name)
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(number) in (int, float) and math.isfinite(number) for number in values):
        raise Unusable("field is no finite number, nor a list of such", f"{name!r}")
    return [float(number) for number in values]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable("half of a surrogate pair, which no UTF-8 can hold", f"at {error.start}") from error
