"""The trust boundary: built updates are read back, and any other bytes are refused with one error.

400 mutated objects are tried for each width of values; the long tests try ``TPLR_FUZZ_CASES`` of them (default 2000:
10,000 in total).
"""

import contextlib
import os
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from tplr.compress import bits as packing
from tplr.compress import elias_fano, interleaved
from tplr.compress.layout import FORMAT, PayloadSpec
from tplr.compress.payload import Update, build, decode_chunks, parse
from tplr.errors import PayloadError

WHO = {"window": 123, "uid": 45}
META = WHO | {"pages_digest": "0a" * 32, "batches": 7}
FUZZ_CASES = int(os.environ.get("TPLR_FUZZ_CASES", "2000"))


def test_round_trip(spec, coefficients):
    made = coefficients()
    body = build(made, spec, **META)
    assert len(body) == spec.expected_size
    update = parse(body, spec, **WHO)
    assert (update.window, update.uid, update.pages_digest, update.batches) == (123, 45, "0a" * 32, 7)
    for name, (indices, values) in made.items():
        tensor = spec.tensors[name]
        got_indices, got_values = update.coefficients(name)
        assert got_values.dtype == torch.float32
        if tensor.dense:
            assert got_indices.tolist() == [list(range(tensor.grid.entries))] * tensor.grid.chunks
        else:
            assert torch.equal(got_indices, indices)
        if spec.bits == 0:
            assert torch.equal(got_values, values)
        else:
            assert (got_values - values).abs().max() < {1: 2.5, 2: 1.5, 4: 1.0, 8: 0.3}[spec.bits]


def test_some_chunks_and_norms_without_decoding_the_rest(spec, coefficients):
    updates = [parse(build(coefficients(seed), spec, **META), spec, **WHO) for seed in range(3)]
    for name, tensor in spec.tensors.items():
        whole = [update.coefficients(name) for update in updates]
        every = np.arange(tensor.grid.chunks)
        for some in (every, every[::-1].copy(), every[::-2].copy()):
            for found, expected in zip(decode_chunks(updates, tensor, some), zip(*whole, strict=True), strict=True):
                assert torch.equal(found, torch.stack(expected)[:, some])
        for update, (_, values) in zip(updates, whole, strict=True):
            assert update.norm(name) == pytest.approx(float(values.double().norm()), rel=1e-6)


def test_chunks_of_tensors_with_one_scale():
    spec = PayloadSpec.of({"a": (64, 48)}, outer="demo", target_chunk=16, topk=5, bits=2, scale="tensor")
    values = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    update = parse(build({"a": (torch.arange(0, 50, 10).repeat(12, 1), values)}, spec, **META), spec, **WHO)
    indices, found = decode_chunks([update], spec.tensors["a"], np.array([3, 7]))
    assert torch.equal(indices[0], update.coefficients("a")[0][[3, 7]])
    assert torch.equal(found[0], update.coefficients("a")[1][[3, 7]])
    assert update.norm("a") == pytest.approx(float(update.coefficients("a")[1].norm()))


def test_the_same_coefficients_are_the_same_bytes(spec, coefficients):
    made = coefficients()
    assert build(made, spec, **META) == build(dict(reversed(made.items())), spec, **META)


def test_stochastic_rounding_draws_anew_for_each_window_uid_and_tensor():
    shapes = {"a": (16, 16), "b": (16, 16)}
    spec = PayloadSpec.of(shapes, outer="demo", target_chunk=16, topk=20, bits=1, rounding="stochastic")
    values = torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    made = dict.fromkeys(shapes, (torch.arange(20)[None], values))
    bodies = [build(made, spec, **META | changes) for changes in ({}, {}, {"window": 124}, {"uid": 46})]
    assert bodies[0] == bodies[1]
    codes = [body[spec.tensors[name].values] for body in bodies[1:] for name in shapes]
    assert len({*codes}) == len(codes)


def test_the_safetensors_library_reads_it(spec, coefficients, tmp_path):
    body = build(coefficients(), spec, **META)
    sections = safetensors.torch.load(body)
    assert sections.keys() == {"codebooks", "values", "scales", "indices"}
    tensor = spec.tensors["embed"]
    start = spec.tensors["attention"].indices.start
    assert (
        sections["indices"].numpy().tobytes()[tensor.indices.start - start : tensor.indices.stop - start]
        == body[tensor.indices]
    )
    assert sections["values"].dtype == (torch.uint8 if spec.bits else torch.float32)
    path = tmp_path / "update.safetensors"
    path.write_bytes(body)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {
            "format": FORMAT,
            "layout": spec.layout,
            "window": "0000000000000123",
            "uid": "00045",
            "pages": "0a" * 32,
            "batches": "0000000007",
        }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body, spec: body[:-1], "size"),
        (lambda body, spec: body + b"\0", "size"),
        (lambda body, spec: b"", "size"),
        (lambda body, spec: struct.pack("<Q", 2**63) + body[8:], "its length"),
        (lambda body, spec: body.replace(b"tplr-update-4", b"tplr-update-3"), "layout"),
        (lambda body, spec: body.replace(b'"window":"0000000000000123"', b'"window":"0000000000000124"'), "window 124"),
        (lambda body, spec: body.replace(b'"uid":"00045"', b'"uid":"00046"'), "of uid 46"),
        (lambda body, spec: body.replace(b'"batches":"0000000007"', b'"batches":"-000000007"'), "spelt"),
        (lambda body, spec: body.replace(b'"pages":"0a', b'"pages":"0A'), "spelt"),
        (lambda body, spec: body.replace(b'"U8","shape"', b'"I8","shape"'), "spelt"),
        (lambda body, spec: body[:-1] + bytes([body[-1] ^ 0x80]), r"entries|increase|above|after the last"),
    ],
)
def test_each_kind_of_lie_has_its_reason(change, reason, coefficients, spec):
    body = build(coefficients(), spec, **META)
    with pytest.raises(PayloadError, match=reason):
        parse(change(body, spec), spec, **WHO)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
@pytest.mark.parametrize("half", [0, 4])
def test_numbers_that_are_not_finite_or_too_large_are_refused(number, half, spec, coefficients):
    body = bytearray(build(coefficients(), spec, **META))
    tensor = spec.tensors["attention"]
    start = (tensor.codebook if spec.bits else tensor.values).start + half
    body[start : start + 4] = struct.pack("<f", number)
    with pytest.raises(PayloadError, match="attention"):
        parse(bytes(body), spec, **WHO)


def test_a_pickle_is_never_loaded(spec, tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("owned").write_text, ("!",))

    for body in (pickle.dumps(Evil()), pickle.dumps(Evil()).ljust(spec.expected_size, b".")):
        with pytest.raises(PayloadError):
            parse(body, spec, **WHO)
    assert not tmp_path.joinpath("owned").exists()


def mutate(body: bytes, spec: PayloadSpec, chance: random.Random) -> bytes:
    """Apply one to four random changes; most of them keep the object's size."""
    changed = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        specs = list(spec.tensors.values())
        tensor = chance.choice(specs)
        section = chance.choice(
            [s for s in (tensor.codebook, tensor.values, tensor.scales, tensor.indices) if s.start < s.stop]
        )
        kind = chance.randrange(8)
        if kind == 0:
            at = chance.randrange(len(changed))
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            at = chance.randrange(min(spec.data_start, len(changed)))
            changed[at] = chance.randrange(256)
        elif kind == 2:
            changed[section] = chance.randbytes(section.stop - section.start)
        elif kind == 3:
            changed[section] = bytes([chance.choice([0, 255])]) * (section.stop - section.start)
        elif kind == 4:
            at = chance.randrange(section.start, section.stop)
            changed[at] = chance.randrange(256)
        elif kind == 5:
            a, b = sorted(chance.sample(range(len(changed) + 1), 2))
            changed[a:b] = bytes(reversed(changed[a:b]))
        elif kind == 6 and chance.random() < 0.2:
            del changed[chance.randrange(1, len(changed)) :]
            break
        elif kind == 7 and chance.random() < 0.2:
            changed += chance.randbytes(chance.randint(1, 9))
            break
    return bytes(changed)


# Text of a valid header -> its false replacement; most keep the length.
LIES = [
    (b'"window":"0000000000000123"', b'"window":"0000000000000122"'),
    (b'"window":"0000000000000123"', b'"window":"123"'),
    (b'"uid":"00045"', b'"uid":"00044"'),
    (b'"uid":"00045"', b'"uid":"00045","uid":"00045"'),
    (b'"uid":"00045"', b'"uid":"00046","uid":"00045"'),
    (b'"dtype":"U8"', b'"dtype":"I8"'),
    (b'"dtype":"U8"', b'"dtype":"F64"'),
    (b'"dtype":"F32"', b'"dtype":"I32"'),
    (b'"dtype":"F32"', b'"dtype":"F16"'),
    (b'"shape":[', b'"shape":[1,'),
    (b'"shape":[', b'"shape":[-'),
    (b'"shape":[', b'"shape":[9'),
    (b'"data_offsets":[0,', b'"data_offsets":[1,'),
    (b'"values":{', b'"scales":{'),
    (b'"scales":{', b'"values":{'),
    (b'{"__metadata__"', b'{"__metadata__":{},"__metadata__"'),
    (b'{"__metadata__":{', b"[" * 5000),
]
NUMBERS = [
    struct.pack("<f", number) for number in (float("nan"), float("inf"), -float("inf"), 3.4e38, -1.0, -0.0, 1e-45)
]
LENGTHS = [0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def lie(body: bytes, spec: PayloadSpec, chance: random.Random) -> bytes:
    """Apply one false statement of the most obvious kinds."""
    kind = chance.randrange(6)
    if kind == 0:
        old, new = chance.choice(LIES)
        return body.replace(old, new, chance.choice([1, 9]))
    if kind == 1:
        return struct.pack("<Q", chance.choice([*LENGTHS, spec.data_start - 8 + chance.choice([-1, 1, 8])])) + body[8:]
    if kind == 2:
        tensor = chance.choice(list(spec.tensors.values()))
        where = tensor.codebook if spec.bits else tensor.values
        at = where.start + 4 * chance.randrange((where.stop - where.start) // 4)
        return body[:at] + chance.choice(NUMBERS) + body[at + 4 :]
    if kind == 3:
        return body[: chance.choice([0, 1, 8, spec.data_start, chance.randrange(len(body))])]
    if kind == 4:  # a header that is longer than it has to be, in an object of the right size
        padding = chance.randint(1, 64)
        longer = struct.pack("<Q", spec.data_start - 8 + padding) + body[8 : spec.data_start] + b" " * padding
        return (longer + body[spec.data_start :])[: chance.choice([len(body), len(body) + padding])]
    return chance.choice([b"\0", b" ", b"{", b"\xff"]) * chance.choice([1, len(body), 10 * len(body)])


@pytest.mark.parametrize("cases", [400, pytest.param(FUZZ_CASES, marks=pytest.mark.long, id="all")])
def test_mutated_objects_are_refused_or_valid(spec, coefficients, cases):
    body = build(coefficients(), spec, **META)
    chance = random.Random(f"fuzz-{spec.bits}")
    outcomes = {True: 0, False: 0}
    accepted_safely(body, spec)  # torch's allocations on first use are not counted
    with bounded_memory(8 * 2**20):
        for _ in range(cases):
            mutant = chance.choice([mutate, mutate, lie])(body, spec, chance)
            outcomes[accepted_safely(mutant, spec)] += 1
    assert min(outcomes.values()) > cases // 30, "the mutations should reach both outcomes"


def accepted_safely(mutant: bytes, spec: PayloadSpec) -> bool:
    try:
        update = parse(mutant, spec, **WHO)
    except PayloadError:
        return False
    assert_safe(update, spec)
    return True


@contextlib.contextmanager
def bounded_memory(limit: int) -> Iterator[None]:
    """Fails if the process ever holds ``limit`` bytes more during the block than before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory held now
    before = peak_memory()
    yield
    assert peak_memory() - before < limit


def peak_memory() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def assert_safe(update: Update, spec: PayloadSpec) -> None:
    """Assert finite values at valid indices, and bytes that are their only encoding."""
    prologue = spec.prologue(
        window=update.window, uid=update.uid, pages_digest=update.pages_digest, batches=update.batches
    )
    assert update.body[: spec.data_start] == prologue
    assert len(update.body) == spec.expected_size
    for name, tensor in spec.tensors.items():
        indices, values = update.coefficients(name)
        assert indices.shape == values.shape == (tensor.grid.chunks, tensor.k)
        assert values.isfinite().all()
        assert values.double().square().sum().isfinite()
        assert (indices >= 0).all()
        assert (indices < tensor.grid.entries).all()
        assert (indices.sort(dim=1).values.diff(dim=1) > 0).all()
        if not tensor.dense:
            spelt = (
                (interleaved if tensor.grouped else elias_fano).encode(indices, tensor.grid.entries).numpy().tobytes()
            )
            assert spelt == update.body[tensor.indices]
        if spec.bits:
            count = tensor.grid.chunks * tensor.k
            codes = packing.unpack(
                torch.frombuffer(bytearray(update.body[tensor.values]), dtype=torch.uint8), spec.bits, count
            )
            assert packing.pack(codes, spec.bits).numpy().tobytes() == update.body[tensor.values]


@pytest.mark.parametrize(
    "wrong", [{"window": -1}, {"uid": 100_000}, {"uid": -1}, {"batches": 10**10}, {"pages_digest": "A" * 64}]
)
def test_metadata_that_does_not_fit_is_refused_when_building(wrong, spec, coefficients):
    with pytest.raises(ValueError, match="digits"):
        build(coefficients(), spec, **META | wrong)


def test_tensors_that_do_not_fit_are_refused_when_building(spec, coefficients):
    made = coefficients()
    for wrong in (
        {name: pair for name, pair in made.items() if name != "norm"},
        made | {"other": made["norm"]},
        made | {"norm": (made["norm"][0], made["norm"][1] * float("nan"))},
        made | {"norm": (made["norm"][0][:, :1], made["norm"][1][:, :1])},
    ):
        with pytest.raises(ValueError, match=r"norm|other"):
            build(wrong, spec, **META)
