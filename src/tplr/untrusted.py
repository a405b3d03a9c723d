"""Parses JSON from other nodes: the bytes become a record, or one documented error is raised.

Texts in a record are arbitrary: ``printable`` makes them safe for a terminal.
"""

import json
import math
from collections import Counter
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from tplr.errors import PayloadError
from tplr.schemas import Wire

WireT = TypeVar("WireT", bound=Wire)
# Pydantic builds all problems to name one of them.
NAMED_PROBLEMS = 100


def parse_untrusted(body: bytes, schema: type[WireT], name: str) -> WireT:
    """Parse a record from bytes, whose number the caller has bounded (``Document.max_bytes``).

    Time and memory are proportional to ``len(body)``, about 30 bytes per byte, because a schema's containers stop at
    their first wrong entry (``FailFast``; ``tests/test_untrusted.py`` checks this for every schema). Pydantic's JSON
    parser would copy the input into each error, for example once for each missing key.

    Args:
        name: name of the record in errors.

    Raises:
        PayloadError: the bytes are not such a record; no other error is raised.
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
    raise PayloadError(f"{name} is not a valid {schema.__name__}: {printable(problem)}")


def printable(text: str) -> str:
    """Somebody's text in one line: characters that command a terminal, or are not seen, as Python writes them."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def load_json(text: str | bytes) -> Any:
    """Parse JSON whose objects have no key twice and whose numbers are finite. Raises ValueError, RecursionError."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:80]} is not a finite number")
    return number


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object (``object_pairs_hook`` of ``json.loads``). Raises ValueError for a repeated key.

    Without it, the last of several equal keys counts.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = min(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"key {repeated!r} is given twice")
    return found
