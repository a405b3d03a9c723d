"""Whole conversations through the chat templates of known models: their text, and the part of it that is trained on.

The templates are short forms of the published ones. ``numbered`` begins with a count, so no rendering is a prefix.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import Encoded, RecordEncoder
from tplr.stores.preprocess.records import Chunk
from tplr.stores.preprocess.tokenizing import RecordTokenizer

TEMPLATES = Path(__file__).parent / "templates"
CHAT = {"sections": [{"field": "messages", "template": True, "action": "$role"}]}
ROLES = {"assistant": "train"}
EOS, BOS = "<eos>", "<bos>"


def chat(*contents: str, system: str | None = None) -> dict:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}


Run = Callable[..., tuple[Encoded, Callable[..., tuple[str, list[str]]]]]


@pytest.fixture
def run(tokenizer_path: Path, tmp_path: Path) -> Run:
    """Encodes records with a template; the function it returns spells text and trained parts of the first sequence."""

    def run(template: str, *records: dict, source: dict = CHAT, **config) -> tuple[Encoded, Callable]:
        folder = shutil.copytree(tokenizer_path, tmp_path / template, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text().rstrip("\n"))
        tokenizing = RecordTokenizer(folder)
        settings = {"input": source, "mask": ROLES, "preprocessing": {"min_chars": 0}, **config}
        encoder = RecordEncoder(PipelineConfig.from_dict(settings), tokenizing)
        found = encoder.encode(Chunk("f.jsonl", 0, [*records], [0] * len(records), [0] * len(records)))

        def spelled(key: str = "sequence", mask: str = "loss_mask") -> tuple[str, list[str]]:
            ids, train = (found.columns[name] for name in (key, mask))
            end = ids.offsets[1]
            decode = tokenizing._tokenizer.decode
            text, parts, part = decode(ids.values[:end].tolist()), [], []
            for token, trained in zip(ids.values[:end].tolist(), [*train.values[:end]], strict=True):
                if trained:
                    part.append(token)
                elif part:
                    parts, part = [*parts, decode(part)], []
            return text, [*parts, decode(part)] if part else parts

        return found, spelled

    return run


def im(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def header(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def turn(role: str, text: str) -> str:
    return f"<start_of_turn>{role}\n{text}<end_of_turn>\n"


@pytest.mark.parametrize(
    ("template", "system", "text", "trained"),
    [
        (
            "chatml",
            "S",
            BOS + im("system", "S") + im("user", "Q") + im("assistant", "A") + im("user", "R") + im("assistant", "é B"),
            ["A<|im_end|>\n", "é B<|im_end|>\n"],
        ),
        (
            "chatml_marked",
            None,
            BOS + im("user", "Q") + im("assistant", "A") + im("user", "R") + im("assistant", "é B"),
            ["A<|im_end|>", "é B<|im_end|>"],
        ),
        (
            "llama3",
            "S",
            BOS
            + header("system", "S")
            + header("user", "Q")
            + header("assistant", "A")
            + header("user", "R")
            + header("assistant", "é B"),
            ["A<|eot_id|>", "é B<|eot_id|>"],
        ),
        (
            "qwen2_5",
            None,
            BOS
            + im("system", "You are Qwen.")
            + im("user", "Q")
            + im("assistant", "A")
            + im("user", "R")
            + im("assistant", "é B"),
            ["A<|im_end|>\n", "é B<|im_end|>\n"],
        ),
        (
            "qwen3",
            "S",
            BOS
            + im("system", "S")
            + im("user", "Q")
            + im("assistant", "A")
            + im("user", "R")
            + im("assistant", "<think>\n\n</think>\n\né B"),
            ["A<|im_end|>\n", "<think>\n\n</think>\n\né B<|im_end|>\n"],
        ),
        (
            "mistral",
            None,
            f"{BOS}[INST] Q [/INST] A{EOS}[INST] R [/INST] é B{EOS}",
            [f" A{EOS}", f" é B{EOS}"],
        ),
        (
            "gemma",
            None,
            BOS + turn("user", "Q") + turn("model", "A") + turn("user", "R") + turn("model", "é B"),
            ["A<end_of_turn>\n", "é B<end_of_turn>\n"],
        ),
        (
            "deepseek_v3",
            "S",
            f"{BOS}S<｜User｜>Q<｜Assistant｜>A{EOS}<｜User｜>R<｜Assistant｜>é B{EOS}",
            [f"A{EOS}", f"é B{EOS}"],
        ),
        (
            "deepseek_r1",
            None,
            f"{BOS}<｜User｜>Q<｜Assistant｜>A{EOS}<｜User｜>R<｜Assistant｜>é B{EOS}",
            [f"A{EOS}", f"é B{EOS}"],
        ),
    ],
)
def test_text_and_mask(run: Run, template: str, system: str | None, text: str, trained: list[str]) -> None:
    _, spelled = run(template, chat("Q", "A", "R", "é B", system=system))
    assert spelled() == (text, trained)


def test_reasoning_that_the_template_drops_from_earlier_turns(run: Run) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    _, spelled = run("qwen3", chat("Q", f"{thought}A", "R", f"{thought}B"))
    assert spelled()[1] == ["A<|im_end|>\n", f"{thought}B<|im_end|>\n"]
    _, spelled = run("deepseek_r1", chat("Q", "<think>hm</think><b>", "R", "<B"))
    assert spelled()[1] == [f"<b>{EOS}", f"<B{EOS}"]


def test_a_default_system_prompt_is_never_trained_on(run: Run) -> None:
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Q"}]
    _, spelled = run("qwen2_5", {"messages": messages})
    assert spelled()[1] == ["Hi<|im_end|>\n"]


@pytest.mark.parametrize(("template", "answer"), [("qwen2_5", "A<|im_end|>\n"), ("mistral", f" A{EOS}")])
def test_sections_are_one_conversation(run: Run, template: str, answer: str) -> None:
    asked = {"field": "prompt", "template": True, "action": "mask"}
    pair = {"chosen": {"sections": [asked, {"field": "chosen", "template": True}]}}
    _, spelled = run(template, {"prompt": "Q", "chosen": "A"}, source={"sources": pair})
    text, trained = spelled("chosen", "chosen_mask")
    assert (text.count("You are Qwen"), trained) == (template == "qwen2_5", [answer])
    group = {"responses": {"sections": [{"field": "text", "template": True}], "list_field": "answers"}}
    _, spelled = run(template, {"answers": ["A", "B"]}, source={"sources": group})
    text, trained = spelled("responses", "responses_mask")
    assert (text.count("Qwen"), text.endswith(answer), trained) == (0, True, [answer])


def test_what_has_no_mask_is_refused(run: Run) -> None:
    found, _ = run("numbered", chat("Q", "A", "R", "B"))
    ((_, reason, told),) = found.skipped
    assert reason == "conversation whose trained part the chat template hides"
    assert "numbered does not render" in told
    assert "{% generation %}" in told
    found, spelled = run("numbered", chat("Q", "A"), mask={}, mask_default="train")
    assert spelled()[1] == ["2 messages\n<user>Q\n<assistant>A\n"]
    found, _ = run("mistral", chat("Q", "A", system="S"))
    assert "Conversation roles must alternate" in found.skipped[0][2]
