"""The border for JSON that somebody else wrote: its bytes become a record, or there is one documented error.

Texts in a record may be anything: ``printable`` makes them fit for a terminal.
"""

from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from tplr.errors import PayloadError
from tplr.schemas import Wire

WireT = TypeVar("WireT", bound=Wire)
# Naming one problem means building all of them.
NAMED_PROBLEMS = 100


def parse_untrusted(body: bytes, schema: type[WireT], name: str) -> WireT:
    """The record in these bytes, whose number the caller has bounded (``Wire.max_bytes``).

    Time and memory stay in proportion to ``len(body)``, some 30 bytes for each: a schema's containers stop at their
    first wrong entry (``FailFast``; ``tests/test_untrusted.py`` holds every schema to it). Pydantic's own parser would
    copy the input into each error: of a document without its keys, as often as it has keys.

    Args:
        name: what it is called in errors.

    Raises:
        PayloadError: the bytes are no such record, whatever they are.
    """
    try:
        return schema.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        problem = f"{error.error_count()} problems"
        if error.error_count() <= NAMED_PROBLEMS:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:200]}".removeprefix(": ")
    except (RecursionError, ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    raise PayloadError(f"{name} is no {schema.__name__}: {printable(problem)}")


def printable(text: str) -> str:
    """Somebody's text in one line: characters that command a terminal, or are not seen, as Python writes them."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
