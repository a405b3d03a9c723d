"""A state dict survives a round trip; a stranger's bytes are a valid state dict or are refused."""

import json
import pickle
import random
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tplr.errors import PayloadError
from tplr.exchange import states
from tplr.exchange.state_objects import put_state
from tplr.exchange.states import (
    MAX_CONTAINERS,
    MAX_HEADER_BYTES,
    MAX_VALUES,
    decode_state,
    encode_state,
    parse_sparse,
    parse_state,
    write_state,
)
from tplr.storage import MemoryStore
from tplr.untrusted import load_json

TOTALKS = {"layer.weight": 4096, "norm": 2}
TOPK = 3


def sparse(**changes: Any) -> dict[str, Any]:
    return {
        "layer.weightidxs": torch.tensor([[0, 7, 4095], [3, 1, 2]], dtype=torch.int16),
        "layer.weightvals": torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, 1.0]]),
        "normidxs": torch.tensor([[1, 0]]),
        "normvals": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "metadata": {"pages": [["config", 5]], "window": 3},
    } | changes


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def numbered(count: int) -> dict[str, Any]:
    return {str(number): number for number in range(count)}


def test_round_trip() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    state = sparse(shared=table, view=table.T, scalar=torch.tensor(2.5), empty=torch.zeros(0, 4), note=None)
    found, step = decode_state(encode_state(state, 17))
    assert step == 17
    assert_equal(found, state)
    for few in ({}, numbered(MAX_VALUES)):
        assert_equal(decode_state(encode_state(few, 0)).state_dict, few)


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"a": object()}, 0),
        ({"a": float("nan")}, 0),
        ({1: 2}, 0),
        ({}, -1),
        ({"a": "x" * MAX_HEADER_BYTES}, 0),
        (numbered(MAX_VALUES + 1), 0),
    ],
)
def test_what_is_no_state_is_refused_when_encoding(state: dict[Any, Any], step: int) -> None:
    with pytest.raises(ValueError, match=r"state dict|expected"):
        encode_state(state, step)


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(10_000):
        found = [found]
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about rare kinds of tensors
@pytest.mark.parametrize(
    ("name", "make", "found"),
    [
        ("a", lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        ("a", lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        ("a", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "2 dimensions"),
        ("a", lambda: torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        ("a", lambda: torch.ones(2).to(torch.float8_e8m0fnu), "torch.float8_e8m0fnu"),  # can be saved, not loaded
        ("a", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "torch.qint8"),
        ("a", lambda: torch.zeros(3, device="meta"), "on meta"),
        ("a", lambda: torch.zeros([1] * 9), "9 dimensions"),
        ("__metadata__", lambda: torch.zeros(3), "'__metadata__' is given twice"),
        ("\ud800", lambda: torch.zeros(3), "surrogates not allowed"),
        ("a", lambda: {1: 1, "1": 2}, "key '1' is given twice"),
        ("a", deep, "recursion depth"),
    ],
)
async def test_an_entry_that_no_reader_accepts_is_named(name: str, make: Callable[[], Any], found: str) -> None:
    store = MemoryStore()
    with pytest.raises(ValueError, match=r"^state dict: .*; expected JSON .*, or a dense tensor") as refused:
        await put_state(store, "key", {"other": torch.ones(2), name: make()}, 1)
    assert repr(name) in str(refused.value)
    assert found in str(refused.value)
    assert await store.list() == []


@pytest.mark.parametrize("step", [True, 1.0, -1, 2**53])
def test_a_step_that_no_reader_accepts_is_refused(step: Any) -> None:
    with pytest.raises(ValueError, match="global_step"):
        encode_state({}, step)


def spelt(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


META = {"state": json.dumps({"global_step": 1, "values": {}})}


def of(**state: Any) -> dict[str, Any]:
    return {"__metadata__": {"state": json.dumps(state)}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 9),
        pickle.dumps({"a": 1}),
        spelt({}),
        spelt([]),
        spelt(b"[" * 100_000),
        spelt({"__metadata__": {}}),
        spelt({"__metadata__": {"state": "[" * 100_000}}),
        spelt(of(global_step=True, values={})),
        spelt(of(global_step=2**53, values={})),
        spelt(of(global_step=-1, values={})),
        spelt(of(global_step=1, values=[])),
        spelt(of(global_step=1)),
        spelt(of(global_step=1, values=numbered(MAX_VALUES + 1))),
        spelt({"__metadata__": {"state": '{"global_step": 1, "global_step": 1, "values": {}}'}}),
        spelt({"__metadata__": {"state": '{"global_step": ' + "9" * 5000 + ', "values": {}}'}}),
        spelt(of(global_step=1, values={"a": 1}) | {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
        spelt({"__metadata__": META, "a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}}, b"xxxx"),
        spelt({"__metadata__": META, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}, b"xxxx"),
        spelt({"__metadata__": META, "a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
        spelt({"__metadata__": META, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xy"),
        spelt({"__metadata__": META, "a": {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}}),
        spelt({"__metadata__": META, "a": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, b"x"),
        spelt({"__metadata__": META, "a": {"dtype": "U8", "shape": [1] * 70, "data_offsets": [0, 1]}}, b"x"),
        spelt(of(global_step=1, values={"a": float("nan")})),
        spelt({"__metadata__": {"state": '{"global_step": 1, "values": {"a": [-1e999]}}'}}),
        spelt(
            b'{"__metadata__":%s,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' % json.dumps(META).encode(),
            b"x",
        ),
    ],
)
def test_strangers_bytes_are_refused_with_one_error(body: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_state(body)


def test_other_tensors_are_refused_before_any_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 1 MiB may name 19,000 tensors, whose creation takes ten times as long as reading the header."""
    valid, other = encode_state(sparse(), 5), encode_state(sparse() | {"other": torch.zeros(1)}, 5)
    loaded: list[bytes] = []

    def noted(body: bytes) -> dict[str, torch.Tensor]:
        loaded.append(body)
        return load(body)

    monkeypatch.setattr(states, "load", noted)
    with pytest.raises(PayloadError, match="1 tensors are missing or unknown"):
        parse_sparse(other, TOTALKS, topk=TOPK, device="cpu")
    assert not loaded
    assert_sparse(parse_sparse(valid, TOTALKS, topk=TOPK, device="cpu").state_dict)
    assert loaded == [valid]


def test_an_own_state_does_not_wait_until_those_of_others_are_parsed() -> None:
    with ThreadPoolExecutor(1) as pool, states._parsing:
        body = pool.submit(encode_state, {"tensor": torch.ones(2), "value": [1]}, 5).result(timeout=30)
    assert decode_state(body).state_dict["value"] == [1]


def test_headers_of_lists_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 lists took a third of a second to parse, and the garbage collector again as long, several times."""
    parsed: list[int] = []

    def noted(text: Any) -> Any:
        parsed.append(len(text))
        return load_json(text)

    allowed = encode_state({"a": [[]] * (MAX_CONTAINERS - 3)}, 5)  # two objects and a list have them
    monkeypatch.setattr(states, "load_json", noted)
    assert len(decode_state(allowed).state_dict["a"]) == MAX_CONTAINERS - 3
    with pytest.raises(ValueError, match="10001 lists and objects"):
        encode_state({"a": [[]] * (MAX_CONTAINERS - 2)}, 5)
    lists, escaped = "[],", "\\u005b\\u005d,"
    for many in (lists * 300_000 + "[]", escaped * (MAX_CONTAINERS + 1) + "[]"):
        parsed.clear()
        values = b'{"global_step":1,"values":{"a":[%s]}}' % many.encode()
        header = b'{"__metadata__":{"state":"%s"}}' % values.replace(b'"', b'\\"')
        with pytest.raises(PayloadError, match="lists and objects, at most"):
            decode_state(spelt(header))
        assert parsed in ([], [len(header)])
    parsed.clear()
    few = spelt({"__metadata__": META | {"more": "[" * (MAX_CONTAINERS + 20)}})
    with pytest.raises(PayloadError, match="lists and objects, at most"):
        parse_sparse(few, TOTALKS, topk=TOPK, device="cpu")  # a header of any names may have more
    assert parsed == []


def test_one_header_is_parsed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers hold the interpreter's lock: ten of them, each in a thread, would stop the event loop together."""
    running, most = 0, 0

    def slow(text: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return load_json(text)

    monkeypatch.setattr(states, "load_json", slow)
    bodies = [encode_state(sparse(), step) for step in range(10)]
    most = 0
    with ThreadPoolExecutor(10) as threads:
        assert [state.global_step for state in threads.map(parse_state, bodies)] == [*range(10)]
    assert most == 1


def test_mutants_are_refused_or_sparse() -> None:
    valid = encode_state(sparse(), 5)
    chance = random.Random(3)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        mutant = bytearray(valid)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(mutant))
            mutant[at] = chance.choice([mutant[at] ^ 1 << chance.randrange(8), chance.randrange(256), ord('"')])
        if chance.random() < 0.1:
            del mutant[chance.randrange(len(mutant)) :]
        try:
            state = parse_sparse(bytes(mutant), TOTALKS, topk=TOPK, device="cpu")
        except PayloadError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert_sparse(state.state_dict)
        assert state.global_step >= 0
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64, torch.complex64]
)
def test_numbers_of_every_kind_must_be_finite(dtype: torch.dtype) -> None:
    good, bad = torch.ones(3).to(dtype), torch.tensor([1.0, float("nan"), 1.0]).to(dtype)
    assert_equal(parse_state(encode_state({"a": good}, 0)).state_dict, {"a": good})
    with pytest.raises(PayloadError, match="a: not finite"):
        parse_state(encode_state({"a": bad}, 0))


@pytest.mark.parametrize(
    "body",
    [
        encode_state({"a\n\x1b[31m": torch.tensor([float("nan")])}, 0),
        spelt({"__metadata__": META, "a\n\x1b[31m": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, b"x"),
        spelt({"__metadata__": META, "a\n\x1b[31m": {"dtype": "U8", "shape": [9], "data_offsets": [0, 1]}}, b"x"),
    ],
)
def test_a_strangers_name_can_not_forge_a_log_line(body: bytes) -> None:
    with pytest.raises(PayloadError) as raised:
        parse_state(body)
    assert str(raised.value).isprintable()


def assert_sparse(state: dict[str, Any]) -> None:
    assert {name for name in state if isinstance(state[name], torch.Tensor)} == sparse().keys() - {"metadata"}
    for parameter, totalk in TOTALKS.items():
        idxs, vals = state[f"{parameter}idxs"].long(), state[f"{parameter}vals"]
        assert idxs.shape == vals.shape
        assert ((idxs >= 0) & (idxs < totalk)).all()
        assert vals.isfinite().all()
        torch.zeros(*idxs.shape[:-1], totalk).scatter_(-1, idxs, vals.float())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normvals": torch.tensor([[float("nan")]])}, "finite"),
        ({"normvals": torch.tensor([[float("inf")]])}, "finite"),
        ({"normvals": torch.tensor([[1.0, 2.0, 3.0]])}, "norm: indices"),
        ({"normvals": torch.tensor([[1]])}, "norm: indices are"),
        ({"normidxs": torch.tensor([[0.0]])}, "norm: indices are"),
        ({"normidxs": torch.tensor([[2, 0]])}, "out of"),
        ({"normidxs": torch.tensor([[-1, 0]])}, "out of"),
        ({"normidxs": torch.tensor([[1, 1]])}, "twice"),
        ({"normidxs": torch.tensor([[1]]), "normvals": torch.ones(1, 1)}, "norm: 1 indices in a row of 2, expected 2"),
        ({"normidxs": torch.tensor(3), "normvals": torch.tensor(1.0)}, "norm: indices"),
        ({"normidxs": torch.zeros(0, 4).long(), "normvals": torch.zeros(0, 4)}, "norm: indices"),
        ({"normidxs": torch.arange(65)[None], "normvals": torch.ones(1, 65)}, "norm: 65 indices"),
        ({"other": torch.ones(1)}, "unknown"),
        ({"normvals": [[1.0]]}, "missing"),
    ],
)
def test_coefficients_that_could_not_be_applied_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert parse_sparse(encode_state(sparse(), 5), TOTALKS, topk=TOPK, device="cpu").global_step == 5
    with pytest.raises(PayloadError, match=reason):
        parse_sparse(encode_state(sparse(**changes), 5), TOTALKS, topk=TOPK, device="cpu")


@pytest.mark.parametrize("totalks", [TOTALKS, None])
def test_values_have_unit_norm_for_each_parameter(totalks: dict[str, int] | None) -> None:
    state = sparse()
    found, step = parse_sparse(encode_state(state, 5), totalks, topk=TOPK, device="cpu")
    values = {"layer.weightvals", "normvals"}
    assert step == 5
    assert_equal({name: found[name] for name in found.keys() - values}, {n: state[n] for n in state.keys() - values})
    for name in values:
        assert found[name].dtype == state[name].dtype
        expected = state[name].double() / state[name].double().norm()
        assert torch.allclose(found[name].double(), expected, rtol=1e-2 if name == "normvals" else 1e-6)


def test_only_values_that_have_indices_are_scaled() -> None:
    state = {"intervals": torch.tensor([3.0, 4.0]), "countidxs": torch.tensor([1]), "countvals": torch.tensor([7])}
    assert_equal(parse_sparse(encode_state(state, 0), None, topk=TOPK, device="cpu").state_dict, state)


@pytest.mark.parametrize(
    ("vals", "expected"),
    [
        (torch.tensor([[10.0, 20.0, 20.0]]), [1 / 3, 2 / 3, 2 / 3]),
        (torch.tensor([[3e38, 0.0, -3e38]]), [0.5**0.5, 0.0, -(0.5**0.5)]),
        (torch.tensor([[6e4, 0.0, 8e4]]).half().clamp(-6e4, 6e4), [0.5**0.5, 0.0, 0.5**0.5]),
        (torch.zeros(1, 3), [0.0, 0.0, 0.0]),
        (torch.tensor([[8.0, 0.0, 0.0]]).to(torch.float8_e4m3fn), [1.0, 0.0, 0.0]),
    ],
)
def test_no_scale_of_values_is_too_large(vals: torch.Tensor, expected: list[float]) -> None:
    body = encode_state({"widxs": torch.tensor([[0, 1, 2]]), "wvals": vals}, 0)
    found = parse_sparse(body, {"w": 9}, topk=TOPK, device="cpu").state_dict["wvals"]
    assert torch.allclose(found.float(), torch.tensor([expected]), atol=1e-3)


def test_a_state_in_a_file_has_the_same_bytes(tmp_path: Path) -> None:
    write_state(tmp_path / "state", sparse(), 17)
    assert decode_state((tmp_path / "state").read_bytes()).global_step == 17
    assert (tmp_path / "state").read_bytes() == encode_state(sparse(), 17)
    with pytest.raises(ValueError, match="at most 1 MiB"):
        write_state(tmp_path / "state", {"a": "x" * MAX_HEADER_BYTES}, 0)
