"""The texts of the page's document."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from synthetic_run import synthetic_document

from tplr.page import document
from tplr.page.document import OUTCOME_OF_REASON, OUTCOMES, RunDocument
from tplr.page.render import to_json
from tplr.schemas import Reason

GUIDE = Path(__file__).parents[2] / "docs" / "page.md"


def test_every_reason_has_a_mark() -> None:
    assert {str(reason.value) for reason in Reason} <= set(OUTCOME_OF_REASON)
    assert all(len(mark) == 1 for mark in OUTCOMES)


def test_a_document_is_read_back_as_it_was() -> None:
    made = synthetic_document(3, 2)
    assert RunDocument.model_validate_json(to_json(made)) == made
    with pytest.raises(ValidationError):
        RunDocument.model_validate_json(to_json(made).replace(b'"format":2', b'"format":3'))


def test_the_guide_names_every_field() -> None:
    text = GUIDE.read_text()
    records = [one for one in vars(document).values() if isinstance(one, type) and issubclass(one, document.Record)]
    fields = {name for one in records for name in one.model_fields}
    assert not sorted(name for name in fields if not re.search(rf"`{name}`", text))
