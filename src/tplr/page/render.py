"""Renders a document as one HTML file that loads nothing from other hosts.

The document is embedded as base64 of its deflated JSON, so text from other nodes can't open or close an HTML element.
The content security policy in the head admits only this file's own script and style, by their hashes.
"""

import base64
import hashlib
import zlib
from functools import cache
from importlib.resources import files

from tplr.page.document import RunDocument

SCRIPTS = ("elements.js", "decode.js", "model.js", "charts.js", "lines.js", "strips.js", "sections.js", "page.js")


def render(document: RunDocument) -> bytes:
    """Return the HTML page."""
    packed = zlib.compress(to_json(document), 9)
    return _shell().replace(b"{{document}}", base64.b64encode(packed))


def to_json(document: RunDocument) -> bytes:
    """Return the document's JSON, as embedded and published."""
    return document.model_dump_json().encode()


@cache
def _shell() -> bytes:
    """Return the page without its document."""
    style = _source("page.css")
    script = '"use strict";\n(() => {\n' + "".join(map(_source, SCRIPTS)) + "})();\n"
    page = _source("page.html")
    parts = {"style_hash": _sha256(style), "script_hash": _sha256(script), "style": style, "script": script}
    for name, value in parts.items():
        page = page.replace("{{" + name + "}}", value)
    return page.encode()


def _source(name: str) -> str:
    return (files("tplr.page") / "view" / name).read_text()


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
