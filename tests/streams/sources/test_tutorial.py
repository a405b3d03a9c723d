"""The code blocks of ``docs/data.md`` run from top to bottom, in one folder, with a server."""

import json
import re
from pathlib import Path

TUTORIAL = Path(__file__).parents[3] / "docs" / "data.md"


def test_every_block_runs(remote, tokenizer, monkeypatch):
    tokenizer.save_pretrained("tokenizer")  # the fixture ``remote`` made an empty folder the current one
    for number in range(2):
        texts = [f"Document {number}.{i}. " + "All work and no play. " * (i % 5) for i in range(40)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        remote.put({f"{number}.jsonl": lines.encode()})
    text = TUTORIAL.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    namespace: dict = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(TUTORIAL), "exec"), namespace)
    assert len(blocks) == text.count("```python") > 15
