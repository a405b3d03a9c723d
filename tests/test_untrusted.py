"""The border for untrusted JSON: damaged documents of every kind end in one error, at bounded cost."""

import random
import typing
from collections.abc import Iterator

import pytest
from hostile import KINDS, bombs, mutated
from pydantic import FailFast, Strict, ValidationError
from pydantic_core import from_json, to_json

from tplr.errors import PayloadError
from tplr.exchange.aggregates import reported_set
from tplr.exchange.snapshot import SnapshotManifest
from tplr.schemas import DebugReport, Document, PeerList, Wire
from tplr.untrusted import parse_untrusted

MUTATIONS = 2_000  # of bodies alone; tests/exchange/test_hostile_envelopes.py has more, signed


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_document_is_one_error_or_a_valid_document(kind: str) -> None:
    schema, body = type(KINDS[kind]), KINDS[kind].model_dump_json().encode()
    assert parse_untrusted(body, schema, kind) == KINDS[kind]
    chance, errors = random.Random(kind), []
    for _ in range(MUTATIONS):
        damaged = mutated(body, chance)
        try:
            found = parse_untrusted(damaged, schema, kind)
        except PayloadError as error:
            errors.append(str(error))
        else:
            # Accepted documents can be written and read again; ``values`` may be anything, including infinity.
            again = parse_untrusted(found.model_dump_json().encode(), schema, kind)
            assert again.model_dump(exclude={"values"}) == found.model_dump(exclude={"values"})
    assert len(errors) > MUTATIONS // 4
    assert all(error.startswith(f"{kind} is not a valid {kind}: ") and len(error) < 500 for error in errors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_of_wrong_entries_costs_one_error_a_field(kind: str) -> None:
    schema = type(KINDS[kind])
    *bombs_of_fields, deep = bombs(schema, min(schema.max_bytes, 2**18))
    with pytest.raises(PayloadError, match="recursion limit"):
        parse_untrusted(deep, schema, kind)
    for bomb in bombs_of_fields:
        with pytest.raises(ValidationError) as found:
            schema.model_validate(from_json(bomb))
        # Without fail-fast it is one for each entry: 250,000 in 1 MiB, whose text has 42 MB.
        errors = found.value.errors(include_input=False, include_url=False, include_context=False)
        assert len([one for one in errors if one["type"] != "extra_forbidden"]) <= 3 * len(schema.model_fields)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keys_are_counted_not_listed(kind: str) -> None:
    schema = type(KINDS[kind])
    bomb = b"{" + b",".join(b'"%x":1' % i for i in range(5000)) + b"}"
    with pytest.raises(PayloadError) as refused:
        parse_untrusted(bomb, schema, kind)
    assert len(str(refused.value)) < 500


def all_records(base: type[Wire]) -> Iterator[type[Wire]]:
    for one in base.__subclasses__():
        yield one
        yield from all_records(one)


@pytest.mark.parametrize("field", ["included", "skipped"])
@pytest.mark.parametrize("uid", ["99999", "65536", "-1", "01", "1e3", " 1", "\u0661"])
def test_a_report_names_only_uids_that_a_set_can_name(field: str, uid: str) -> None:
    told = {"included": {"65535": "a" * 64}, "skipped": {"7": "missing"}}
    report = from_json(KINDS["DebugReport"].model_dump_json()) | told
    found = reported_set(DebugReport.model_validate_json(to_json(report)), "1", size=1)
    assert [one.uid for one in found.included] == [65535]
    report[field] = {uid: next(iter(told[field].values()))}
    with pytest.raises(PayloadError, match=field):
        parse_untrusted(to_json(report), DebugReport, "report")


def test_every_kind_of_document_is_tried_here_and_has_a_name_of_its_own() -> None:
    found = [one for one in all_records(Document) if one.__module__.startswith("tplr.") and hasattr(one, "kind")]
    assert {one.__name__ for one in found} == {*KINDS}
    assert len({one.kind for one in found}) == len(found)


def test_every_container_of_a_record_stops_at_its_first_wrong_entry() -> None:
    found = [one for one in all_records(Wire) if one.__module__.startswith("tplr.")]
    assert {SnapshotManifest, PeerList} <= {*found}
    for record in found:
        for name, field in record.model_fields.items():
            if typing.get_origin(field.annotation) in (tuple, dict, list) and (record, name) not in BOUNDED:
                where = f"{record.__name__}.{name}: use schemas.Items, or dict with FailFast"
                assert any(isinstance(one, FailFast) for one in field.metadata), where
                if typing.get_origin(field.annotation) is tuple:
                    assert Strict(False) in field.metadata, where  # parsed JSON has lists


# Any content is accepted there; only the number of bytes is bounded.
BOUNDED = {(SnapshotManifest, "values")}


def test_an_error_commands_no_terminal() -> None:
    body = KINDS["DebugReport"].model_dump_json().encode()
    damaged = body.replace(b'"included":{', b'"included":{"\\u001b[2J\\n":"",')
    with pytest.raises(PayloadError, match=r"\\x1b\[2J\\n") as error:
        parse_untrusted(damaged, DebugReport, "a report")
    assert str(error.value).isprintable()
