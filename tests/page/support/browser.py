"""Opens a page in the system's Chromium, driven by Playwright; the page may contact no host."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "install one (Debian: apt-get install chromium) and the extra 'test'"


class OpenPage:
    """A page in a tab, with its console messages and requests."""

    def __init__(self, tab, path: Path, fragment: str) -> None:
        self.tab = tab
        self.problems: list[str] = []
        self.requests: list[str] = []
        tab.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))
        self._performance = tab.context.new_cdp_session(tab)
        self._performance.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.goto(path.as_uri() + fragment)
        tab.wait_for_selector("html[data-ready]", timeout=60_000)

    @property
    def milliseconds(self) -> int:
        """Return the milliseconds from the start of loading until everything is drawn."""
        return int(self.tab.evaluate("document.documentElement.dataset.ready"))

    @property
    def processor_seconds(self) -> float:
        """Return the processor time of the page's main thread, which other load does not affect."""
        metrics = self._performance.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    @property
    def fragment(self) -> str:
        """Return the fragment of the address from the page itself; the driver's copy is late."""
        return self.tab.evaluate("location.hash")

    @property
    def selected(self) -> str:
        """Return the bar's text about the selected window."""
        return self.tab.locator("#window-text").inner_text()

    @property
    def explanation(self) -> list[tuple[str, str]]:
        """Return the rows of the shown explanation."""
        names, texts = (self.tab.locator(f".explain {tag}").all_inner_texts() for tag in ("dt", "dd"))
        return list(zip(names, texts, strict=True))


class Browser:
    """A running Chromium."""

    def __init__(self, chromium) -> None:
        self._chromium = chromium

    @contextmanager
    def page(
        self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", fragment: str = ""
    ) -> Iterator[OpenPage]:
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, has_touch=width < 600
        )
        try:
            yield OpenPage(context.new_page(), path, fragment)
        finally:
            context.close()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a Chromium; without one, skip the test with installation instructions."""
    api = pytest.importorskip("playwright.sync_api", reason=f"no Playwright: {HOW}")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium: {HOW}")
    with api.sync_playwright() as playwright:
        # Tests may run as root and in containers with little shared memory.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
