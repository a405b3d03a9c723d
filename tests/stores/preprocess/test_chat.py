"""Whole conversations through chat templates of known models: the text, and its trained part.

The templates are shortened versions of the published ones. ``numbered`` begins with a count, so no rendering is a
prefix.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError

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
    """Encode records with a template; the returned function gives text and trained parts of the first sequence."""

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


def of(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


CONVERSATIONS = {
    "plain": of(("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "é B")),
    "system": of(("system", "S"), ("user", "Q"), ("assistant", "A")),
    "assistant first": of(("assistant", "Hi"), ("user", "Q"), ("assistant", "A")),
    "two users": of(("user", "Q"), ("user", "R"), ("assistant", "A")),
    "two assistants": of(("user", "Q"), ("assistant", "A"), ("assistant", "B")),
    "empty answer": of(("user", "Q"), ("assistant", ""), ("user", "R"), ("assistant", "B")),
    "empty question": of(("user", ""), ("assistant", "A")),
    "system alone": of(("system", "S")),
    "assistant alone": of(("assistant", "A")),
    "tool": of(("user", "Q"), ("assistant", "call"), ("tool", "42"), ("assistant", "A")),
    "equal": of(("user", "A"), ("assistant", "A"), ("user", "A"), ("assistant", "A")),
    "white space": of(("user", " Q "), ("assistant", "  A \n"), ("user", "R\n"), ("assistant", " B ")),
}


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.jinja") if path.stem != "numbered"))
def test_as_transformers_renders_and_masks(run: Run, tokenizer_path: Path, template: str) -> None:
    """Ids equal those of ``apply_chat_template``, and so does the mask of a template with markers. Without markers,
    each assistant's text is trained on with its end, and nothing else."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    text = (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
    marked, compared = "{% generation %}" in text, 0
    for name, record in CONVERSATIONS.items():
        found, spelled = run(template, record)
        try:
            theirs = tokenizer.apply_chat_template(
                record["messages"],
                chat_template=text,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=marked,
            )
        except TemplateError as error:
            refusal = str(error)
        else:
            refusal = ""
        assert [reason[2].endswith(refusal) for reason in found.skipped] == ([True] if refusal else []), name
        if refusal:
            continue
        begins = theirs["input_ids"][:1] == [1]  # a template without BOS gets one
        assert found.columns["sequence"].values.tolist() == [1] * (not begins) + theirs["input_ids"], name
        mask = found.columns["loss_mask"].values.tolist()
        if marked:
            assert mask == [False] * (not begins) + [bool(one) for one in theirs["assistant_masks"]], name
        trained = spelled()[1]
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        assert len(trained) == len(answers), name
        for part, answer in zip(trained, answers, strict=True):
            part = part.removeprefix("<think>\n\n</think>\n\n").strip()  # noqa: PLW2901
            assert re.fullmatch(rf"{answer.strip()}\s*(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<eos>)", part), (
                name,
                part,
            )
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize(
    ("template", "first", "later"),
    [
        ("chatml", im("user", "Q"), im("user", "R")),
        ("llama3", header("user", "Q"), header("user", "R")),
        ("qwen2_5", im("user", "Q"), im("user", "R")),
        ("gemma", turn("user", "Q"), turn("user", "R")),
        ("mistral", "[INST] Q [/INST]", "[INST] R [/INST]"),
        ("deepseek_v3", "<｜User｜>Q", "<｜User｜>R"),
    ],
)
def test_a_trained_user_message_has_its_header_wherever_it_is(run: Run, template: str, first: str, later: str) -> None:
    _, spelled = run(template, chat("Q", "A", "R", "B"), mask={"user": "train"})
    assert spelled()[1] == [first, later]
    _, spelled = run(template, chat("Q"), mask={"user": "train"})
    assert spelled()[1] == [first]


def test_what_has_no_mask_is_refused(run: Run) -> None:
    found, _ = run("numbered", chat("Q", "A", "R", "B"))
    ((_, reason, told),) = found.skipped
    assert reason == "conversation whose trained part the chat template omits"
    assert "numbered does not render" in told
    assert "{% generation %}" in told
    found, spelled = run("numbered", chat("Q", "A"), mask={}, mask_default="train")
    assert spelled()[1] == ["2 messages\n<user>Q\n<assistant>A\n"]
    found, _ = run("mistral", chat("Q", "A", system="S"))
    assert "Conversation roles must alternate" in found.skipped[0][2]
