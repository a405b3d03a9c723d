"""Records become ids and masks, checked against the texts: each byte is one token, 1 is BOS, 0 is EOS."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tplr.errors import ConfigError
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import Encoded, RecordEncoder
from tplr.stores.preprocess.records import Chunk
from tplr.stores.preprocess.tokenizing import RecordTokenizer

ROLES = {"system": "mask", "user": "mask", "assistant": "train"}
MESSAGES = {"sections": [{"field": "messages", "template": True, "action": "$role"}]}


@pytest.fixture(scope="session")
def encode(tokenizer_path: Path) -> Callable[..., Encoded]:
    tokenizing = RecordTokenizer(tokenizer_path)

    def encode(source: dict, *records: Any, preprocessing: dict | None = None, **config: Any) -> Encoded:
        settings = {"min_chars": 0, **(preprocessing or {})}
        parsed = PipelineConfig.from_dict({"input": source, "preprocessing": settings, **config})
        return RecordEncoder(parsed, tokenizing).encode(
            Chunk("f.jsonl", 0, [*records], [0] * len(records), [0] * len(records))
        )

    return encode


@pytest.fixture(scope="session")
def spelled(tokenizer_path: Path) -> Callable[..., list[tuple[str, str]]]:
    """Return, for each list of a key, the text of its tokens and the trained part."""
    backend = RecordTokenizer(tokenizer_path)._tokenizer.backend_tokenizer

    def spelled(encoded: Encoded, key: str = "sequence", mask: str = "loss_mask") -> list[tuple[str, str]]:
        ids, train = encoded.columns[key], encoded.columns[mask]
        assert (ids.offsets == train.offsets).all()
        assert (ids.values.dtype, train.values.dtype) == (np.int32, np.bool_)
        spans = [slice(a, b) for a, b in zip(ids.offsets, ids.offsets[1:], strict=False)]
        decode = lambda tokens: backend.decode(tokens.tolist(), skip_special_tokens=False)  # noqa: E731
        return [(decode(ids.values[span]), decode(ids.values[span][train.values[span]])) for span in spans]

    return spelled


def test_texts(encode, spelled) -> None:
    sections = {"sections": [{"field": "q", "action": "mask"}, {"field": "a"}]}
    found = encode(sections, {"q": "why? ", "a": "so"}, {"q": "é", "a": "ü"})
    # The first section gets the tokenizer's special tokens, the second none.
    assert spelled(found) == [("<bos>why? so", "so"), ("<bos>éü", "ü")]
    assert found.tokens.tolist() == [8, 5]
    bare = {"sections": [{"field": "q", "action": "mask", "add_special_tokens": False}, {"field": "a"}]}
    assert spelled(encode(bare, {"q": "why? ", "a": "so"})) == [("why? so", "so")]


def test_messages_are_masked_by_role(encode, spelled) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    found = encode(MESSAGES, {"messages": chat}, mask=ROLES)
    assert spelled(found) == [("<bos><system>S\n<user>Q\n<assistant>A\n", "<assistant>A\n")]
    found = encode(MESSAGES, {"messages": [{"role": "tool", "content": "T"}, *chat]}, mask=ROLES, mask_default="train")
    assert spelled(found)[0][1] == "<tool>T\n<assistant>A\n"
    everything = {"sections": [{"field": "messages", "template": True}]}
    assert spelled(encode(everything, {"messages": chat}))[0][1] == "<system>S\n<user>Q\n<assistant>A\n"


def test_pairs_and_groups(encode, spelled) -> None:
    asked = {"field": "prompt", "template": True, "action": "mask"}
    pairs = {key: {"sections": [asked, {"field": key, "template": True}]} for key in ("chosen", "rejected")}
    record = {"prompt": "P", "chosen": "good", "rejected": [{"role": "assistant", "content": "bad"}]}
    found = encode({"sources": pairs}, record)
    assert spelled(found, "chosen", "chosen_mask") == [("<bos><user>P\n<assistant>good\n", "<assistant>good\n")]
    assert spelled(found, "rejected", "rejected_mask") == [("<bos><user>P\n<assistant>bad\n", "<assistant>bad\n")]

    grouped = {
        "prompts": {"sections": [{"field": "prompt", "action": "mask"}], "mask_key": None},
        "responses": {"sections": [{"field": "text"}], "list_field": "answers", "mask_key": "masks"},
        "rewards": {"sections": [{"field": "scores", "action": "value"}]},
    }
    first = {"prompt": "P", "answers": ["one", "two!"], "scores": [0.8, 0]}
    second = {"prompt": "Q", "answers": [{"text": "three"}], "scores": 0.25}
    found = encode({"sources": grouped}, first, second)
    assert sorted(found.columns) == ["masks", "prompts", "responses", "rewards"]
    assert spelled(found, "responses", "masks") == [("one", "one"), ("two!", "two!"), ("three", "three")]
    assert found.columns["responses"].groups.tolist() == [0, 2, 3]
    rewards = found.columns["rewards"]
    assert (rewards.values.dtype, rewards.offsets.tolist()) == (np.float32, [0, 2, 3])
    assert rewards.values.tolist() == [np.float32(0.8), 0, 0.25]


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("float32", 0.5, 1e39),
        ("float32", 1, 10**400),
        ("float64", 123456789.125, 2**53 + 1),
        ("int64", 16777217, -(2**53) - 1),
        ("int8", -128, 300),
    ],
)
def test_numbers_are_stored_as_they_are_or_refused(encode, dtype, good, bad) -> None:
    source = {"text": {"sections": [{"field": "t"}]}, "v": {"sections": [{"field": "v", "action": "value"}]}}
    records = [{"t": "abc", "v": value} for value in (good, bad)]
    found = encode({"sources": source}, *records, output={"dtype": {"v": dtype}})
    assert found.columns["v"].values.tolist() == [good]
    assert [index for index, *_ in found.skipped] == [1]


def test_min_chars_is_for_the_record_not_for_elements_of_a_list(encode, spelled) -> None:
    group = {
        "prompts": {"sections": [{"field": "prompt", "action": "mask"}], "mask_key": None},
        "responses": {"sections": [{"field": "responses"}], "list_field": True, "mask_key": "masks"},
    }
    found = encode({"sources": group}, {"prompt": "P", "responses": ["4", "5"]}, preprocessing={"min_chars": 50})
    assert spelled(found, "responses", "masks") == [("4", "4"), ("5", "5")]
    alone = {"responses": group["responses"]}
    assert not encode({"sources": alone}, {"responses": ["4"]}, preprocessing={"min_chars": 50}).skipped
    # Two trained keys of one record are its text together.
    both = {key: {"sections": [{"field": key}]} for key in ("one", "other")}
    found = encode(
        {"sources": both}, *({"one": "abc", "other": "d" * n} for n in (2, 3)), preprocessing={"min_chars": 6}
    )
    assert found.places.tolist() == [1]
    assert [reason for _, reason, _ in found.skipped] == ["fewer characters than min_chars"]


@pytest.mark.parametrize(("mode", "text"), [("keep_start", "<bos>abc"), ("keep_end", "defg")])
def test_what_is_too_long_is_cut_and_counted(encode, spelled, mode: str, text: str) -> None:
    found = encode(
        {"sections": [{"field": "t"}]}, {"t": "abcdefg"}, preprocessing={"max_seq_len": 4, "truncation_mode": mode}
    )
    assert spelled(found)[0][0] == text
    assert found.cut.tolist() == [4]


def test_eos_where_it_is_asked_for(encode, spelled) -> None:
    found = encode({"sections": [{"field": "t"}]}, {"t": "ab"}, {"t": "ab<eos>"}, preprocessing={"append_eos": True})
    assert [text for _, text in spelled(found)] == ["<bos>ab<eos>"] * 2


def test_batches_give_what_single_records_give(encode) -> None:
    records = [{"t": "x" * n + "é " * (n % 3)} for n in range(1, 9)]
    together = encode({"sections": [{"field": "t"}]}, *records)
    alone = [encode({"sections": [{"field": "t"}]}, record) for record in records]
    assert together.columns["sequence"].values.tolist() == [
        token for one in alone for token in one.columns["sequence"].values.tolist()
    ]


@pytest.mark.parametrize(
    ("source", "record", "reason", "detail"),
    [
        ("text", b'{"t": "x"', "malformed record", "not JSON"),
        ("text", b"\xff\xfe", "malformed record", "not JSON"),
        ("text", b"[1]", "malformed record", "not an object, but list"),
        ("text", {}, "missing field", "'t'"),
        ("text", {"t": None}, "missing field", "'t'"),
        ("text", {"t": 5}, "field is not text", "'t' holds int"),
        ("text", {"t": " \n"}, "blank", ""),
        ("text", {"t": "ab"}, "fewer characters than min_chars", ""),
        ("text", {"t": "x" * 21}, "more characters than max_chars", ""),
        ("text", {"t": "\ud800 and more"}, "lone surrogate", ""),
        ("chat", {"messages": "x" * 5}, None, ""),
        ("chat", {"messages": []}, "field is not a list of messages", "holds list"),
        ("chat", {"messages": [{"content": "x"}]}, "message without a role", "'messages'"),
        (
            "chat",
            {"messages": [{"role": "forbidden", "content": "x"}]},
            "conversation that the chat template rejects",
            "",
        ),
        ("group", {"r": []}, "field is not a list", "'r' holds list"),
        ("group", {"r": ["x"], "v": [float("nan")]}, "field is not a finite number", "'v'"),
        ("group", {"r": ["x"], "v": [True]}, "field is not a finite number", "'v'"),
        ("group", {"r": ["x"], "v": []}, "field is not a finite number", "'v'"),
        ("group", {"r": ["x", "y"], "v": [1]}, "responses and rewards differ in number", "2 and 1"),
        ("group", {"r": ["x", "y"], "v": 1}, "responses and rewards differ in number", "2 and 1"),
        ("group", {"r": ["x"], "v": [1, 0]}, "responses and rewards differ in number", "1 and 2"),
    ],
)
def test_records_that_can_not_be_used(encode, source: str, record, reason: str | None, detail: str) -> None:
    sources = {
        "text": {"sections": [{"field": "t"}]},
        "chat": MESSAGES,
        "group": {
            "sources": {
                "responses": {"sections": [{"field": "x"}], "list_field": "r"},
                "rewards": {"sections": [{"field": "v", "action": "value"}]},
            }
        },
    }
    limits = {"min_chars": 3, "max_chars": 20} if source == "text" else {}
    found = encode(sources[source], record, preprocessing=limits)
    if reason is None:
        assert len(found.places) == 1
        return
    ((index, counted, told),) = found.skipped
    assert (index, len(found.places)) == (0, 0)
    assert counted.startswith(reason)
    assert detail in told


def test_what_the_tokenizer_lacks_is_said_before_any_work(tokenizer_path: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(tokenizer_path, tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    bare = RecordTokenizer(folder)
    with pytest.raises(ConfigError, match="no chat template"):
        bare.check(PipelineConfig.from_dict({"input": MESSAGES}))
    with pytest.raises(ConfigError, match="can't be loaded"):
        RecordTokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"tokenizer gpt2: can't be loaded: no such folder"):
        RecordTokenizer("gpt2")  # no network request
    assert bare.fingerprint != RecordTokenizer(tokenizer_path).fingerprint
