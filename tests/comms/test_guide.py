"""The code blocks of ``docs/comms.md`` run from top to bottom, in one empty folder."""

import ast
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tplr.comms import Comms

GUIDE = Path(__file__).parents[2] / "docs" / "comms.md"


async def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    text = GUIDE.read_text()
    namespace: dict[str, Any] = {}
    blocks = [*re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(GUIDE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        pending = eval(code, namespace)
        if inspect.iscoroutine(pending):
            await pending
    assert len(blocks) == text.count("```python") == 8
    assert {path.name for path in tmp_path.iterdir()} == {"s3", "chain.db", "wallets", "dataset", "cache"}


def test_methods_that_the_guide_names_exist() -> None:
    named = {*re.findall(r"\bcomms\.(\w+)", GUIDE.read_text())}
    assert len(named) >= 10
    assert [name for name in named - {"md", "uid"} if not hasattr(Comms, name) and name != "clock"] == []
