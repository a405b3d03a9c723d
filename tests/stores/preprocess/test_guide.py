"""The code blocks of ``docs/preprocessing.md`` run from top to bottom, in one folder."""

import re
import shutil
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "preprocessing.md"


def test_every_block_runs(tokenizer_path: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(tokenizer_path, tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    namespace: dict = {}
    blocks = [*re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(GUIDE), "exec"), namespace)
    assert len(blocks) == text.count("```python") == 7


def test_every_knob_stands_in_the_guide() -> None:
    from tplr.stores.preprocess.config import Input, Output, PipelineConfig, Preprocessing, Section, SourceConfig

    text = GUIDE.read_text()
    names = {name for model in (Input, Output, Preprocessing, Section, SourceConfig) for name in model.model_fields}
    names |= {*PipelineConfig.model_fields} - {"version", "input", "preprocessing", "output"}
    assert [name for name in sorted(names) if f"{name}" not in text] == []
