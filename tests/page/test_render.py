"""The page as bytes: strangers' text stays text, nothing is fetched, and the page is small."""

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path

import pytest
from synthetic_run import synthetic_document

from tplr.page import render as rendering
from tplr.page.document import RunDocument
from tplr.page.render import SCRIPTS, render, to_json

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u2029<!--<script>&\0'\""
MAX_BYTES = 2 * 10**6


def embedded(page: bytes) -> bytes:
    found = re.search(rb'<script type="text/plain" id="document">([^<]*)</script>', page)
    assert found
    return zlib.decompress(base64.b64decode(found[1], validate=True))


def test_the_page_holds_its_document() -> None:
    document = synthetic_document(5, 3)
    page = render(document)
    assert embedded(page) == to_json(document)
    assert RunDocument.model_validate_json(embedded(page)) == document
    assert b"{{" not in page.split(b"<script>")[0]


def test_the_policy_admits_its_own_script_and_style_alone() -> None:
    page = render(synthetic_document(2, 1)).decode()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    for tag in ("script", "style"):
        [source] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # It would refuse an event handler or a style attribute.
    assert not re.search(r"<[^>]* (on\w+|style)=", page.split("<script>")[0])


def test_every_script_is_part_of_the_page() -> None:
    folder = Path(rendering.__file__).parent / "view"
    assert {path.name for path in folder.iterdir()} == {*SCRIPTS, "page.css", "page.html"}


def test_nothing_is_fetched_and_no_text_becomes_markup() -> None:
    page = render(synthetic_document(2, 1)).decode()
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"'`)]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace name, which is never fetched
    script = page.split("<script>")[1]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
        assert word not in script, word


def test_hostile_names_end_no_element() -> None:
    made = synthetic_document(4, 3, names={1: HOSTILE, 2: "]]>" + HOSTILE})
    raw = json.loads(to_json(made))
    raw["windows"]["sealed"] = {str(made.windows.first): HOSTILE}
    raw["run"]["network"] = HOSTILE
    raw["strikes"] = [{"window": made.windows.first, "uid": 1, "rule": HOSTILE, "meaning": HOSTILE}]
    page = render(RunDocument.model_validate(raw))
    plain = render(made)
    assert page.count(b"<") == plain.count(b"<") == render(synthetic_document(4, 3)).count(b"<")
    assert json.loads(embedded(page))["nodes"][1]["name"] == HOSTILE


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_thousand_windows_of_twenty_miners_are_small() -> None:
    assert len(render(synthetic_document(2000, 20))) <= MAX_BYTES


@pytest.mark.long
def test_a_longer_run_of_the_same_kind_grows_in_proportion() -> None:
    """A tenth of the windows, with a tenth of the bound plus the page's fixed part."""
    small, large = (len(render(synthetic_document(windows, 20))) for windows in (1, 200))
    assert large - small <= MAX_BYTES / 10
