"""The page in a real browser: it draws, the slider moves, a click explains; desktop and phone sizes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, OpenPage, open_browser
from synthetic_run import FIRST, synthetic_document

from tplr.page.document import RunDocument
from tplr.page.render import render, to_json
from tplr.page.sentences import unpack

WINDOWS, MINERS = 60, 8
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">\u2028<b>bold</b>"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def document() -> RunDocument:
    return synthetic_document(WINDOWS, MINERS)


@pytest.fixture(scope="module")
def path(document: RunDocument, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page"), document)


def write(folder: Path, document: RunDocument) -> Path:
    path = folder / "page.html"
    path.write_bytes(render(document))
    return path


def clean(page: OpenPage, path: Path) -> None:
    """Assert an empty console, and no request except for the file itself."""
    assert page.problems == []
    assert [url.split("#")[0] for url in page.requests if not url.startswith("data:")] == [path.as_uri()]


def cell(page: OpenPage, row: int, index: int) -> tuple[float, float]:
    """Return the position of a cell of the first strip."""
    return tuple(
        page.tab.evaluate(
            """([row, index]) => {
                const host = document.querySelector("canvas").parentElement;
                const box = host.getBoundingClientRect();
                return [box.left + host.chart.toX(index) + host.chart.cellWidth / 2, box.top + 22 * row + 11];
            }""",
            [row, index],
        )
    )


def test_everything_is_drawn(browser, path, document) -> None:
    with browser.page(path) as page:
        headings = page.tab.locator("h2").all_inner_texts()
        assert {
            "Loss",
            "Miners and windows",
            "Why this pay",
            "Pay",
            "Credit",
            "Utilisation",
            "One model",
            "arithmetic: acc",
        } <= {*headings}
        assert page.tab.locator("h1").inner_text() == f"{MINERS} miners train one model: windows 40 to {39 + WINDOWS}"
        assert "Models differed after 2 windows, first after window 70" in page.tab.locator("#verdict").inner_text()
        # Every line has points, and every axis a name with a unit.
        for svg in page.tab.locator(".plot svg").all():
            lines = svg.locator("path").all()
            assert lines
            assert all(len(line.get_attribute("d") or "") > 20 for line in lines)
            assert len(svg.locator(".axis .name").all()) == 2
            assert len(svg.locator(".axis text").all()) >= 6
        blank = (
            """(canvas) => new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size"""
        )
        assert all(canvas.evaluate(blank) > 3 for canvas in page.tab.locator("canvas").all())
        clean(page, path)


def test_a_click_explains_in_the_words_of_explain(browser, path, document) -> None:
    with browser.page(path) as page:
        page.tab.locator("canvas").first.scroll_into_view_if_needed()
        for row, index in ((2, 7), (0, 0), (MINERS - 1, WINDOWS - 1)):
            page.tab.mouse.click(*cell(page, row, index))
            assert page.explanation == unpack(document.explanations, row + 1, index)
            assert page.selected.startswith(f"Window {FIRST + index} ")
            assert page.fragment == f"#window={FIRST + index}&uid={row + 1}"
        command = page.tab.locator(".command").inner_text()
        assert command == f"tplr explain --uid {MINERS} --window {FIRST + WINDOWS - 1} --validator 0"
        # A row of the window's table also selects its miner.
        page.tab.get_by_role("button", name="miner-2 (uid 2)").click()
        assert page.explanation == unpack(document.explanations, 2, WINDOWS - 1)
        clean(page, path)


def test_every_explanation_is_unpacked_alike(browser, path, document) -> None:
    """The page script's unpacking equals Python's in all cells; the address selects them."""
    with browser.page(path) as page:
        for uid in range(1, MINERS + 1):
            for index in range(0, WINDOWS, 13):
                page.tab.evaluate("(to) => { location.hash = to; }", f"window={FIRST + index}&uid={uid}")
                page.tab.wait_for_function(
                    "(text) => document.querySelector('h3').textContent === text",
                    arg=f"miner-{uid} (uid {uid}) in window {FIRST + index}",
                )
                assert page.explanation == unpack(document.explanations, uid, index), (uid, index)


def test_the_slider_and_the_keys_move(browser, path) -> None:
    with browser.page(path, fragment=f"#window={FIRST}&uid=1") as page:
        cursor = page.tab.locator(".cursor").first
        before = float(cursor.get_attribute("x1") or 0)
        slider = page.tab.locator("#window")
        slider.fill("30")
        assert page.selected.startswith(f"Window {FIRST + 30} ")
        assert float(cursor.get_attribute("x1") or 0) > before + 100
        assert "models differ" in page.selected
        assert slider.get_attribute("aria-valuetext").startswith(f"window {FIRST + 30}, loss ")
        slider.press("ArrowRight")
        page.tab.get_by_role("button", name="Next window").click()
        assert page.selected.startswith(f"Window {FIRST + 32} ")
        page.tab.locator("canvas").first.focus()
        for key in ("ArrowLeft", "ArrowDown", "ArrowDown", "ArrowUp"):
            page.tab.keyboard.press(key)
        assert page.fragment == f"#window={FIRST + 31}&uid=2"
        page.tab.keyboard.press("End")
        assert page.selected.startswith(f"Window {FIRST + WINDOWS - 1} ")
        page.tab.keyboard.press("Home")
        assert page.selected.startswith(f"Window {FIRST} ")


def test_the_choices_and_the_numbers_behind_charts(browser, path, document) -> None:
    with browser.page(path) as page:
        name = page.tab.locator(".plot svg").first.locator(".axis .name").first
        assert name.inner_html() == "window"
        page.tab.get_by_role("button", name="Tokens").click()
        assert name.inner_html() == "tokens in the included updates"
        page.tab.get_by_role("button", name="Pay", exact=True).click()
        assert page.tab.get_by_text("more is darker").is_visible()
        page.tab.get_by_text("Show the numbers").first.click()
        first = page.tab.locator("details table").first
        first.locator("tbody tr").last.wait_for()  # rows are made after the click is done
        assert first.locator("tbody tr").count() == WINDOWS
        last = first.locator("tbody tr").last.inner_text()
        assert f"{document.losses.held_out[-1]:.3f}" in last
        clean(page, path)


def test_dark_and_light(browser, path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser.page(path, scheme="dark") as page:
        dark = page.tab.evaluate(ground)
        page.tab.locator("#theme").click()
        light = page.tab.evaluate(ground)
        brightness = [sum(map(int, re.findall(r"\d+", one)[:3])) for one in (dark, light)]
        assert brightness[0] < 150 < 600 < brightness[1]
        assert page.tab.locator("#theme").inner_text() == "Theme: light"
        clean(page, path)


@pytest.mark.parametrize("width", [320, 390, 820, 1280, 1920])
def test_nothing_is_wider_than_the_screen(browser, path, width) -> None:
    with browser.page(path, width=width, height=844) as page:
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
        right = "Math.max(...[...document.querySelectorAll('.card')].map((one) => one.getBoundingClientRect().right))"
        assert page.tab.evaluate(right) <= width
        clean(page, path)


def test_a_touch_selects_on_a_phone(browser, path, document) -> None:
    with browser.page(path, width=390, height=844) as page:
        page.tab.locator("canvas").first.scroll_into_view_if_needed()
        page.tab.touchscreen.tap(*cell(page, 4, 20))
        assert page.explanation == unpack(document.explanations, 5, 20)


def test_what_strangers_wrote_is_shown_as_text(browser, tmp_path) -> None:
    made = synthetic_document(4, 3, names={1: HOSTILE})
    raw = json.loads(to_json(made))
    raw["run"]["network"] = HOSTILE
    raw["strikes"] = [{"window": FIRST, "uid": 1, "rule": HOSTILE, "meaning": HOSTILE}]
    raw["evaluations"] = [
        {"window": FIRST, "task": HOSTILE, "metric": HOSTILE, "value": 1.0, "error": None, "uid": 1},
        {"window": FIRST, "task": "held-out pages", "metric": "nats per token", "value": 9.0, "error": None, "uid": 0},
    ]
    raw["audits"][0]["text"] = HOSTILE
    raw["explanations"]["templates"][0]["parts"] = [HOSTILE]
    raw["explanations"]["templates"][0] |= {"decimals": [], "numbers": []}
    raw["explanations"]["names"][raw["explanations"]["templates"][0]["name"]] = HOSTILE
    path = write(tmp_path, RunDocument.model_validate(raw))
    with browser.page(path, fragment=f"#window={FIRST}&uid=1") as page:
        assert page.tab.title().startswith("templar: 3 miners")
        assert page.tab.locator("img, b b, body script:not([id]) ~ script").count() == 0
        assert page.tab.locator(".explain dd").first.evaluate("(one) => one.textContent") == HOSTILE
        assert page.tab.get_by_text("onerror").count() >= 4
        assert page.tab.locator(".legend").first.get_by_text("evaluations").is_visible()
        clean(page, path)


def test_a_run_without_windows_and_a_run_without_events(browser, tmp_path) -> None:
    from synthetic_run import RUN

    from tplr.page.assemble import assemble
    from tplr.page.history import WindowRecord

    path = write(tmp_path, assemble(RUN, {}, [], []))
    with browser.page(path) as page:
        assert page.tab.locator("h1").inner_text() == "A run without a finished window"
        clean(page, path)
    path = write(tmp_path, assemble(RUN, {FIRST: WindowRecord(window=FIRST)}, [], []))
    with browser.page(path) as page:
        assert page.tab.get_by_text("No miner has taken part yet.").is_visible()
        clean(page, path)
    path = write(tmp_path, assemble(RUN, {FIRST: WindowRecord(window=FIRST, included=(1,))}, [], []))
    with browser.page(path) as page:
        assert page.tab.get_by_text("create the page with --read-events").is_visible()
        assert page.tab.get_by_text("No data was published about this miner in this window.").is_visible()
        clean(page, path)


@pytest.mark.parametrize("values", [(1e17, 1e17 + 16), (-1e300, 1e300), (-1.7e308, 1.7e308)])
def test_huge_numbers_of_strangers_are_drawn(browser, tmp_path, values) -> None:
    raw = json.loads(to_json(synthetic_document(4, 2)))
    raw["evaluations"] = [
        {"window": FIRST + at, "task": "any", "metric": "acc", "value": value, "error": None, "uid": 0}
        for at, value in enumerate(values)
    ]
    with browser.page(write(tmp_path, RunDocument.model_validate(raw))) as page:
        assert page.tab.get_by_role("heading", name="any: acc").is_visible()
        clean(page, tmp_path / "page.html")


def test_a_uid_that_changed_hands_has_two_rows_and_one_owner_in_a_window(browser, tmp_path) -> None:
    made = synthetic_document(4, 2)
    raw = json.loads(to_json(made))
    hotkeys = "5Former" + "r" * 41, f"5Miner{2:042d}"
    for name, marks in (("miners", "outcomes"), ("nodes", "models")):
        one = next(one for one in raw[name] if one["uid"] == 2)
        former = one | {"hotkey": hotkeys[0], marks: one[marks][:2] + "--"}
        one |= {"hotkey": hotkeys[1], marks: "--" + one[marks][2:]}
        raw[name].insert(raw[name].index(one), former)
    path = write(tmp_path, RunDocument.model_validate(raw))
    with browser.page(path, fragment=f"#window={FIRST}&uid=2") as page:
        heading = page.tab.locator("h3").first
        assert heading.inner_text() == f"miner-2 (uid 2) of 5Formerr… in window {FIRST}"
        page.tab.get_by_role("button", name="Next window").click(click_count=2)
        assert heading.inner_text() == f"miner-2 (uid 2) of 5Miner00… in window {FIRST + 2}"
        assert page.explanation == unpack(made.explanations, 2, 2)
        window = page.tab.locator("section").filter(has=page.tab.get_by_text("Updates of the selected window"))
        assert window.locator("tbody tr").count() == 2
        clean(page, path)


def test_votes_are_drawn_where_there_are_some(browser, tmp_path) -> None:
    made = synthetic_document(4, 2)
    raw = json.loads(to_json(made))
    electors = [
        {"uid": 0, "hotkey": "", "stake": 0.75, "votes": "yyn."},
        {"uid": 2, "hotkey": "", "stake": 0.25, "votes": "y.yy"},
    ]
    raw["elections"] = {"electors": electors, "decided": "ccv."}
    path = write(tmp_path, RunDocument.model_validate(raw))
    with browser.page(path) as page:
        votes = page.tab.locator("section").filter(has=page.tab.get_by_role("heading", name="Votes"))
        assert votes.locator("canvas").count() == 1
        said = votes.locator(".legend").inner_text()
        for words in ("committed to the decided value", "committed to another value", "void"):
            assert words in said
        clean(page, path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_thousand_windows_are_drawn(browser, tmp_path) -> None:
    """``scripts/benchmarks/page.py`` measures the time."""
    document = synthetic_document(2000, 20)
    path = write(tmp_path, document)
    with browser.page(path, fragment=f"#window={FIRST + 1000}&uid=7") as page:
        assert page.explanation == unpack(document.explanations, 7, 1000)
        page.tab.get_by_role("button", name="Near the selected").click()
        page.tab.mouse.click(*cell(page, 11, 1010))
        assert page.explanation == unpack(document.explanations, 12, 1010)
        clean(page, path)
