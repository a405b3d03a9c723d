"""Packs the sentences of explanations: stores equal words once, and their numbers in columns.

A page of 2,000 windows and 20 miners has half a million sentences, 50 MB of text. Most differ from each other only in
their numbers, which change little from window to window.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tplr.page.document import Explanations, Numbers, Template

Row = tuple[str, str]  # a name, and the sentence

# A separate number as printed; a sign before it belongs to the words. Other forms (1e-05, 007) are words.
NUMBER = re.compile(r"(?<![\w.])(0|[1-9]\d{0,8})(?:\.(\d{1,6}))?(?!\w|\.\d)", re.ASCII)
# Bounds, because a hostile report can vary its words without limit. Honest reports have a few hundred sentences.
MAX_TEMPLATES = 2048
MAX_SHAPES = 4096
TOO_MANY = ("", "too many different sentences in this run: see tplr explain")
# Columns shorter than this are not shared: the search costs more than it saves.
MIN_SHARED = 64

_Key = tuple[str, tuple[str, ...], tuple[int, ...]]  # name, words, decimals


@dataclass
class _Draft:
    """A template under construction.

    Attributes:
        cells: the cell of each sentence, ascending.
        values: the numbers of each sentence.
    """

    cells: list[int] = field(default_factory=list)
    values: list[list[int]] = field(default_factory=list)


class _Packer:
    def __init__(self) -> None:
        self.drafts: dict[_Key, _Draft] = {}
        self.numbers: dict[_Key, int] = {}
        self.shapes: dict[tuple[int, ...], int] = {}
        self._cell = 0

    def add(self, rows: Sequence[Row]) -> int:
        """Add the next cell, and return its shape."""
        split = [_split(row) for row in rows]
        if not self._has_room(split):
            split = [_split(TOO_MANY)]
        shape = tuple(self._number(key) for key, _ in split)
        for key, values in split:
            self.drafts[key].cells.append(self._cell)
            self.drafts[key].values.append(values)
        self._cell += 1
        return self.shapes.setdefault(shape, len(self.shapes))

    def _has_room(self, split: Sequence[tuple[_Key, list[int]]]) -> bool:
        fresh = {key for key, _ in split if key not in self.drafts}
        if fresh:
            return len(self.drafts) + len(fresh) <= MAX_TEMPLATES and len(self.shapes) < MAX_SHAPES
        shape = tuple(self._number(key) for key, _ in split)
        return shape in self.shapes or len(self.shapes) < MAX_SHAPES

    def _number(self, key: _Key) -> int:
        self.drafts.setdefault(key, _Draft())
        return self.numbers.setdefault(key, len(self.numbers))


def pack(rows: Mapping[int, Sequence[Sequence[Row] | None]]) -> Explanations:
    """Pack the rows of each miner (by uid) and window. ``unpack`` restores them exactly.

    ``TOO_MANY`` replaces a cell with a sentence beyond ``MAX_TEMPLATES``, or a list of sentences beyond ``MAX_SHAPES``.
    """
    packer = _Packer()
    cells = {
        uid: tuple(-1 if cell is None else packer.add(cell) for cell in windows)
        for uid, windows in sorted(rows.items())
    }
    names = sorted({name for name, _, _ in packer.drafts})
    columns = _shared([_columns(key, draft) for key, draft in packer.drafts.items()])
    templates = tuple(
        Template(name=names.index(name), parts=parts, decimals=decimals, numbers=numbers)
        for (name, parts, decimals), numbers in zip(packer.drafts, columns, strict=True)
    )
    return Explanations(names=tuple(names), templates=templates, shapes=tuple(packer.shapes), cells=cells)


def unpack(packed: Explanations, uid: int, index: int) -> list[Row] | None:
    """Return the rows of a miner in the window at ``index`` of its cells; None without an explanation."""
    shape = packed.cells[uid][index]
    if shape < 0:
        return None
    seen: dict[int, int] = {}
    rows = []
    for number in packed.shapes[shape]:
        template = packed.templates[number]
        place = _sentences_before(packed, uid, index, number) + seen.get(number, 0)
        seen[number] = seen.get(number, 0) + 1
        text = template.parts[0]
        for column, decimals, part in zip(template.numbers, template.decimals, template.parts[1:], strict=True):
            where = place
            if column.same:
                where = _sentences_before(packed, uid, index, column.same[0])
                column = packed.templates[column.same[0]].numbers[column.same[1]]  # noqa: PLW2901
            text += _printed(sum(column.deltas[: where + 1]), decimals) + part
        rows.append((packed.names[template.name], text))
    return rows


def _sentences_before(packed: Explanations, uid: int, index: int, template: int) -> int:
    """Return the number of sentences of a template in the cells before this one."""
    count = 0
    per_shape = [shape.count(template) for shape in packed.shapes]
    for other, shapes in packed.cells.items():
        count += sum(per_shape[shape] for shape in (shapes[:index] if other == uid else shapes) if shape >= 0)
        if other == uid:
            break
    return count


def _printed(value: int, decimals: int) -> str:
    digits = str(value).zfill(decimals + 1)
    return f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits


def _split(row: Row) -> tuple[_Key, list[int]]:
    """Split a sentence into its key (name, words, decimals) and its numbers in units of their last decimals."""
    name, text = row
    parts, decimals, values, end = [], [], [], 0
    for found in NUMBER.finditer(text):
        parts.append(text[end : found.start()])
        fraction = found[2] or ""
        decimals.append(len(fraction))
        values.append(int(found[1] + fraction))
        end = found.end()
    return (name, (*parts, text[end:]), tuple(decimals)), values


@dataclass(frozen=True)
class _Column:
    """The numbers at one place of a template's sentences, and the cells of these sentences."""

    cells: np.ndarray
    values: np.ndarray
    decimals: int


def _columns(key: _Key, draft: _Draft) -> list[_Column]:
    cells, values = np.array(draft.cells), np.array(draft.values, np.int64)
    return [_Column(cells, values[:, place], decimals) for place, decimals in enumerate(key[2])]


def _shared(templates: Sequence[Sequence[_Column]]) -> list[tuple[Numbers, ...]]:
    """Return each column's numbers, or a reference to an earlier column with the same number in every cell."""
    written: list[tuple[tuple[int, int], _Column]] = []
    found: list[tuple[Numbers, ...]] = []
    for number, columns in enumerate(templates):
        mine: list[Numbers] = []
        for place, column in enumerate(columns):
            same = next((where for where, other in written if _equals(column, other)), None)
            deltas = () if same else tuple(np.diff(column.values, prepend=0).tolist())
            mine.append(Numbers(deltas=deltas, same=same))
            if not same and _is_shareable(column):
                written.append(((number, place), column))
        found.append(tuple(mine))
    return found


def _is_shareable(column: _Column) -> bool:
    """Return whether a column is long, varies, and has one number for each cell."""
    varies = len(column.cells) >= MIN_SHARED and bool((column.values != column.values[0]).any())
    return varies and bool((np.diff(column.cells) > 0).all())


def _equals(column: _Column, other: _Column) -> bool:
    if column.decimals != other.decimals or not _is_shareable(column):
        return False
    places = np.searchsorted(other.cells, column.cells)
    if places[-1] >= len(other.cells) or (other.cells[places] != column.cells).any():
        return False
    return bool((other.values[places] == column.values).all())
