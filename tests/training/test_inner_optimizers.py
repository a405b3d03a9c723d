"""Which tensors Muon updates, and how; ``test_inner.py`` compares whole windows with PyTorch's optimizers."""

import math

import pytest
import torch

from tplr.model_check import MODEL_TYPES
from tplr.training import inner_optimizers
from tplr.training.inner import InnerLoop
from tplr.training.inner_optimizers import (
    COEFFICIENTS,
    ITERATIONS,
    RMS,
    is_hidden_matrix,
    matrices_shape,
    newton_schulz_flops,
    orthogonalized,
)
from tplr.training.model import build_model, meta_model
from tplr.training.outer.norm_caps import norm_bound
from tplr.training.schemes import payload_spec

ATTENTION = {f"self_attn.{one}_proj.weight" for one in "qkvo"}
MLP = {f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
MUON = {"inner_optimizer": "muon", "muon_momentum": 0.95}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_matrices_of_layers_are_muons_and_everything_else_is_not(model_type, hparams_of):
    """Embedding, head, norms and the router of experts are AdamW's, in every type of model."""
    model = meta_model(hparams_of(model_type, "sparseloco"))
    found = {name for name, one in model.named_parameters() if is_hidden_matrix(name, one.shape)}
    expected = ATTENTION | (EXPERTS if model_type == "qwen3_moe" else MLP)
    assert found == {f"model.layers.{layer}.{name}" for layer in range(2) for name in expected}


@pytest.mark.parametrize("shape", [(12, 12), (24, 8), (8, 24), (5, 24, 8)])
def test_newton_schulz_is_that_of_pytorch(shape):
    """In bfloat16 the same, for a matrix; experts one by one, and float32, near it."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(whole.bfloat16())
    assert found.dtype == torch.bfloat16
    for matrix, half, exact in zip(
        *(one.view(-1, *shape[-2:]) for one in (whole, found, orthogonalized(whole))), strict=True
    ):
        expected = step_of_pytorch(matrix)
        if len(shape) == 2:
            torch.testing.assert_close(half.float(), expected, atol=0, rtol=1e-6)
        for one in (half.float(), exact):
            assert (one - expected).norm() < 0.05 * expected.norm()
        values = torch.linalg.svdvals(exact)
        assert 0.6 < values.min() < values.max() < 1.25


def step_of_pytorch(gradient):
    """Return the step that ``torch.optim.Muon`` subtracts, without its factor."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    parameter.grad = gradient.clone()
    optimizer.step()
    return -parameter.detach() / math.sqrt(max(1.0, gradient.shape[0] / gradient.shape[1]))


def test_zeros_stay_zeros():
    assert not orthogonalized(torch.zeros(3, 4, 8)).any()


def test_an_experts_gate_and_up_projection_are_two_matrices():
    assert matrices_shape("model.layers.0.mlp.experts.gate_up_proj", (4, 32, 16)) == (8, 16, 16)
    assert matrices_shape("model.layers.0.mlp.experts.down_proj", (4, 16, 32)) == (4, 16, 32)
    assert matrices_shape("model.layers.0.self_attn.q_proj.weight", (16, 32)) == (16, 32)


def test_flops_are_those_that_pytorch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for name, shape in (("q_proj", (16, 48)), ("experts.gate_up_proj", (4, 96, 16))):
        with FlopCounterMode(display=False) as counter:
            orthogonalized(torch.randn(matrices_shape(name, shape)))
        assert newton_schulz_flops(name, shape) == counter.get_total_flops()


def test_experts_take_the_step_of_matrices_on_their_own(hparams_of, batches):
    """Through the inner loop: a step from zero momentum is the orthogonalized gradient of each expert's halves."""
    rate = {"peak": 1e-2, "warmup_steps": 0, "t_max": 100, "start_factor": 1.0, "floor_factor": 1.0}
    hparams = hparams_of(
        "qwen3_moe",
        "sparseloco",
        **MUON | {"inner_steps": 1, "batches_per_inner_step": 4, "inner_learning_rate": rate, "weight_decay": 0.0},
    )
    model = build_model(hparams)
    inner = InnerLoop(dict(model.named_parameters()), hparams)
    name, gradients = "model.layers.0.mlp.experts.gate_up_proj", []
    model.get_parameter(name).register_post_accumulate_grad_hook(lambda one: gradients.append(one.grad.clone()))
    work = inner.run(model, batches(), step=0).tensors[name]
    # The gradient of four batches, added up; Muon's direction does not depend on its length.
    for expert, half in ((0, slice(0, 16)), (3, slice(16, 32))):
        expected = orthogonalized(gradients[-1][expert, half]) * 1e-2 * RMS * math.sqrt(16)
        torch.testing.assert_close(work[expert, half], expected, atol=1e-5, rtol=1e-3)


def test_no_honest_step_is_longer_than_the_bound_of_its_norm(tiny, batches):
    """For any gradient: all singular values are at most the largest that the iterations leave."""
    rate = {"peak": 1e-2, "warmup_steps": 0, "t_max": 10**6, "start_factor": 1.0, "floor_factor": 1.0}
    hparams = tiny(
        "sparseloco",
        **MUON | {"inner_steps": 4, "batches_per_inner_step": 1, "inner_learning_rate": rate, "weight_decay": 0.0},
    )
    model, spec = build_model(hparams), payload_spec(hparams)
    inner = InnerLoop(dict(model.named_parameters()), hparams)
    assert hparams.sparseloco is not None
    # One repeated batch: all steps have the same direction, which gives the longest possible sum.
    pages = batches(0, 1).repeat(4, axis=0)
    for window in range(3):
        work = inner.run(model, pages, step=window).tensors
        for name, one in work.items():
            if is_hidden_matrix(name, one.shape):
                first = norm_bound(spec.tensors[name], hparams.sparseloco, 0)
                assert 0.3 * first < one.norm() <= first


def test_the_polynomial_keeps_singular_values_below_the_factor_of_the_bound():
    """``MUON_RMS / RMS`` in ``norm_caps.py``: five iterations from any value in (0, 1]."""
    a, b, c = COEFFICIENTS
    values = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    assert values.max() < 1.25


def test_a_matrix_takes_the_same_step_beside_others_as_alone(tiny, batches, monkeypatch):
    """Matrices of one shape are orthogonalized together, in parts of ``BATCH_ENTRIES``."""
    hparams = tiny("sparseloco", **MUON | {"inner_steps": 2, "batches_per_inner_step": 1})
    counts: list[int] = []

    def counted(matrices, *, out=None):
        counts.append(len(matrices))
        return orthogonalized(matrices, out=out)

    def work(entries):
        counts.clear()
        monkeypatch.setattr(inner_optimizers, "BATCH_ENTRIES", entries)
        model = build_model(hparams)
        return InnerLoop(dict(model.named_parameters()), hparams).run(model, batches(0, 2), step=0).tensors

    monkeypatch.setattr(inner_optimizers, "orthogonalized", counted)
    alone = work(1)
    assert set(counts) == {1}
    beside = work(2**24)
    assert min(counts) > 1
    for name, tensor in beside.items():
        torch.testing.assert_close(tensor, alone[name], atol=0, rtol=0)
