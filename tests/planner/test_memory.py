"""Memory by kind, against the memory that PyTorch and a node's training state use."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tplr.compress.payload import decode_all, parse
from tplr.node.train_state import TrainState
from tplr.planner.memory import activations_per_token, device_memory
from tplr.planner.plan import SNAPSHOTS, USABLE, make_plan
from tplr.planner.workload import Workload
from tplr.training.alignment import probe_gradient
from tplr.training.device import DeviceSettings
from tplr.training.loss import batch_loss
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme

FULL = DeviceSettings(checkpointing="full")
OFFLOADED = DeviceSettings(checkpointing="full", offload_weights=True, offload_error_feedback=True)
SMALL = {"vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
SHAPES = {
    "every head its own keys": {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 8},
    "four heads share keys": {**SMALL, "hidden_size": 256, "intermediate_size": 768, "num_key_value_heads": 2},
    "wider": {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_key_value_heads": 8},
    "large heads": {**SMALL, "hidden_size": 256, "intermediate_size": 768, "num_key_value_heads": 4, "head_dim": 96},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.long), "float32"])
def test_activations_are_those_that_autograd_saves(sparseloco, sized, shape, precision):
    few, many = (sized(sparseloco, precision=precision, **shape | {"num_hidden_layers": n}) for n in (2, 6))
    layers = _saved_bytes(many) - _saved_bytes(few)
    if precision == "bfloat16":  # the weights' casts, which are a separate kind
        layers -= 2 * (Workload.of(many).matmul_parameters - Workload.of(few).matmul_parameters)
    tokens = many.batch_size * many.sequence_length
    planned = sum(
        sign * activations_per_token(Workload.of(one), DeviceSettings())[0] for one, sign in ((many, 1), (few, -1))
    )
    assert planned * tokens == pytest.approx(layers, rel=0.1)


def _saved_bytes(hparams) -> int:
    """Return the bytes that autograd keeps for the backward pass of one batch, without the weights."""
    model = build_model(hparams)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # alive: its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch_loss(model, np.zeros((hparams.batch_size, hparams.sequence_length), np.int64), hparams.precision)
    return sum(one.untyped_storage().nbytes() for pointer, one in saved.items() if pointer not in weights)


@pytest.mark.parametrize("scheme", ["demo", "sparseloco", "muon"])
def test_persistent_kinds_are_the_tensors_of_a_training_state(request, sized, tmp_path, scheme):
    muon = {"inner_optimizer": "muon", "muon_momentum": 0.95} if scheme == "muon" else {}
    fixture = "sparseloco" if muon else scheme
    hparams = sized(request.getfixturevalue(fixture), **SHAPES["four heads share keys"], precision="float32")
    if hparams.sparseloco:
        inner = hparams.sparseloco.model_copy(update={"inner_steps": 1, "batches_per_inner_step": 1} | muon)
        hparams = hparams.model_copy(update={"sparseloco": inner})
    state = TrainState(build_model(hparams), hparams, tmp_path)
    batches = np.zeros((1, hparams.batch_size, hparams.sequence_length), np.int64)
    work = state.local.run(state.model, batches, step=0)
    state.outer.pack(work.tensors, step=0, window=1, uid=1, pages_digest="0" * 64, batches=1)

    planned = device_memory(Workload.of(hparams), "miner", DeviceSettings(), ranks=1, on_cpu=True).device
    assert planned["weights"] == _bytes(state.parameters)
    assert planned["gradients"] == _bytes(work.tensors)
    kept = state.outer.state_dict(copies=False)["tensors"]
    own = {name: one for name, one in kept.items() if not name.startswith("shared.caps.")}  # 32 bytes each
    assert planned["error feedback"] == _bytes(own)
    assert planned.get("moments", 0) == _bytes(state.local.state_dict(copies=False)["tensors"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_saved_state_takes_the_planned_disk(sized, sparseloco, host, tmp_path, momentum):
    hparams = sized(sparseloco, **SHAPES["four heads share keys"], precision="float32")
    changes = {"inner_steps": 1, "batches_per_inner_step": 1, "outer_momentum": momentum}
    hparams = hparams.model_copy(update={"sparseloco": hparams.sparseloco.model_copy(update=changes)})
    state = TrainState(build_model(hparams), hparams, tmp_path)
    batches = np.zeros((1, hparams.batch_size, hparams.sequence_length), np.int64)
    state.outer.pack(
        state.local.run(state.model, batches, step=0).tensors, step=0, window=1, uid=1, pages_digest="0" * 64, batches=1
    )
    state.start_window = 0
    state.save(1, {})
    written = sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
    assert make_plan(hparams, host()).disk / SNAPSHOTS == pytest.approx(written, rel=0.02)


@pytest.mark.parametrize("vocabulary", [1024, 37 * 41, 1031])
def test_the_outer_step_has_room_for_the_entries_of_all_peers(sized, sparseloco, vocabulary):
    """Chunks are divisors of a tensor's shape, so an odd vocabulary has more of them, and a prime one sends more."""
    hparams = sized(sparseloco, **SHAPES["every head its own keys"] | {"vocab_size": vocabulary})
    parameters = {name: one.detach() for name, one in build_model(hparams).named_parameters()}
    outer = outer_scheme(parameters, hparams)
    body = outer.pack(parameters, step=0, window=1, uid=1, pages_digest="0" * 64, batches=1)
    update = parse(body, outer.spec, window=1, uid=1)
    held = decode_all([update] * hparams.max_topk_peers, [outer.spec.tensors["lm_head.weight"]])
    planned = device_memory(Workload.of(hparams), "miner", DeviceSettings(), ranks=1, on_cpu=True).device
    assert planned["largest tensor"] >= 8 * vocabulary * 256 + sum(one.numel() * one.element_size() for one in held)


def test_a_validator_has_room_for_the_backward_passes_that_align_updates(sized, sparseloco):
    """One is after half of the window's step. Only the profile ``documented`` measures with forward passes alone."""
    hparams = sized(sparseloco, **SHAPES["four heads share keys"], precision="float32")
    batches = np.zeros((1, hparams.batch_size, hparams.sequence_length), np.int64)
    found = probe_gradient(build_model(hparams), batches, "float32")
    miner, validator, documented = (
        device_memory(Workload.of(one), role, DeviceSettings(), ranks=1, on_cpu=True)
        for one, role in (
            (hparams, "miner"),
            (hparams, "validator"),
            (hparams.model_copy(update={"profile": "documented"}), "validator"),
        )
    )
    assert validator.device["gradients"] == validator.device["trial weights"] == _bytes(found.tensors)
    assert "gradients" not in documented.device
    for kind in ("activations", "loss"):
        assert validator.device[kind] == miner.device[kind] > documented.device[kind]
    assert validator.peak > documented.peak


def _bytes(tensors) -> int:
    return sum(one.numel() * one.element_size() for one in tensors.values())


def test_ranks_share_what_is_sharded(sparseloco):
    load = Workload.of(sparseloco)
    one, four = (device_memory(load, "miner", DeviceSettings(), ranks=n, on_cpu=False) for n in (1, 4))
    for kind in ("weights", "gradients", "moments", "weights before"):
        assert four.device[kind] == pytest.approx(one.device[kind] / 4, abs=16)
    quarter = one.device["error feedback"] / 4
    assert quarter <= four.device["error feedback"] <= quarter + 4 * load.largest
    assert four.peak < one.peak


def test_checkpointing_and_offload_lower_the_peak(sparseloco):
    load = Workload.of(sparseloco)
    plans = [
        device_memory(load, "miner", settings, ranks=1, on_cpu=False)
        for settings in (
            DeviceSettings(),
            DeviceSettings(checkpointing="selective"),
            DeviceSettings(checkpointing="full"),
        )
    ]
    peaks = [one.peak for one in plans]
    assert peaks == sorted(set(peaks), reverse=True)
    offloaded = device_memory(
        load,
        "miner",
        OFFLOADED,
        ranks=1,
        on_cpu=False,
    )
    moved = 8 * load.parameters  # two float32 of each parameter
    assert sum(offloaded.host.values()) - sum(plans[2].host.values()) == moved
    assert plans[2].peak - offloaded.peak == pytest.approx(moved, rel=1e-6)


def test_an_8b_miner_fits_one_h200_with_all_that_saves_memory(sparseloco, sized):
    shape = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    hparams = sized(sparseloco, sequence_length=2048, batch_size=4, **shape, **heads)
    load, saving = Workload.of(hparams), replace(OFFLOADED, compile=True, loss_rows=1024)

    def peak(**changes) -> float:
        return device_memory(load, "miner", replace(saving, **changes), ranks=1, on_cpu=False).peak / 2**30

    assert 120 < peak() < USABLE * 140
    for worse in ({"loss_rows": 4096}, {"checkpointing": "selective"}, {"offload_weights": False}):
        assert peak(**worse) > USABLE * 140, worse
