"""``docs/hparams.md`` lists every key of the schema, with its default and the nodes that must agree on it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tplr.hparams import (
    DemoParams,
    DocumentedScores,
    HParams,
    ModelParams,
    OuterRate,
    SparselocoParams,
    StoreParams,
    Upgrade,
)

GUIDE = (Path(__file__).parents[1] / "docs" / "hparams.md").read_text()
ROW = re.compile(r"^\| `([\w.\[\]]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (all|validators|local) \|$", re.M)
ROWS = {key: (unit, default, effect) for key, unit, default, effect, _ in ROW.findall(GUIDE)}
GROUPS: dict[str, type[BaseModel]] = {
    "": HParams,
    "upgrades[]": Upgrade,
    "model": ModelParams,
    "store": StoreParams,
    "demo": DemoParams,
    "sparseloco": SparselocoParams,
    "sparseloco.outer_learning_rate_points[]": OuterRate,
    "documented_scores": DocumentedScores,
}


def keys() -> Iterator[tuple[str, FieldInfo]]:
    for group, schema in GROUPS.items():
        yield from ((f"{group}.{name}".lstrip("."), field) for name, field in schema.model_fields.items())


def test_every_key_has_one_row_and_every_row_a_key() -> None:
    assert len(ROW.findall(GUIDE)) == len(ROWS)
    assert sorted(ROWS) == sorted(key for key, _ in keys())


def test_every_row_of_a_table_was_read() -> None:
    assert len(re.findall(r"^\| `", GUIDE, re.M)) == len(ROWS)


@pytest.mark.parametrize(("key", "field"), list(keys()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_default_is_the_schemas(key: str, field: FieldInfo) -> None:
    written = ROWS[key][1].strip()
    if field.is_required():
        assert written == "–"
    elif isinstance(field.default, BaseModel):
        assert written == "its defaults"
    elif isinstance(field.default, tuple):
        assert tuple(json.loads(written)) == field.default
    else:
        assert json.loads(written) == field.default
