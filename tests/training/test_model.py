"""The model of a run: same weights everywhere, gradient and losses against plain PyTorch, fingerprints."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tplr.errors import ConfigError
from tplr.hparams import HParams, load_hparams
from tplr.training import fingerprint as fingerprints
from tplr.training.gradient import WindowGradient
from tplr.training.loss import batch_loss, mean_loss
from tplr.training.model import build_model, set_first_weights

SMALL = Path(__file__).parents[2] / "src/tplr/localnet/hparams.json"


@pytest.fixture(scope="module")
def hparams() -> HParams:
    full = load_hparams(SMALL)
    tiny = full.model.model_copy(update={"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48})
    return full.model_copy(update={"model": tiny})


@pytest.fixture(scope="module")
def model(hparams: HParams) -> PreTrainedModel:
    return build_model(hparams)


@pytest.fixture(scope="module")
def batches() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (4, 2, 16))


def test_weights_follow_from_the_seed_and_leave_random_state_alone(hparams: HParams, model: PreTrainedModel) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    other = build_model(hparams)
    assert torch.equal(torch.rand(3), expected)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
        assert parameter.dtype == torch.float32
    different = build_model(hparams.model_copy(update={"init_seed": 43}))
    assert not torch.equal(different.lm_head.weight, model.lm_head.weight)


def test_without_first_weights_nothing_is_drawn_and_no_weight_looks_like_one(
    hparams: HParams, model: PreTrainedModel
) -> None:
    other = build_model(hparams, first_weights=False)
    assert all(parameter.isnan().all() for parameter in other.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    set_first_weights(dict(other.named_parameters()), hparams)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_each_module_draws_its_weights_alone(hparams: HParams, model: PreTrainedModel) -> None:
    """Neither the number of layers nor the other modules matter, and buffers of the class are unchanged."""
    taller = hparams.model.model_copy(update={"num_hidden_layers": 3})
    other = build_model(hparams.model_copy(update={"model": taller}))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    layers = [layer.self_attn.q_proj.weight for layer in other.model.layers]
    assert not torch.equal(layers[0], layers[2])
    assert layers[2].std().item() == pytest.approx(hparams.model.initializer_range, rel=0.1)
    plain = AutoModelForCausalLM.from_config(hparams.model_config_for_transformers())
    for (name, expected), (found_name, found) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert name == found_name
        assert torch.equal(found, expected)
    assert torch.equal(model.model.norm.weight, plain.model.norm.weight)


def test_tied_weights_stay_tied(hparams: HParams) -> None:
    tied = hparams.model_copy(update={"model": hparams.model.model_copy(update={"tie_word_embeddings": True})})
    model = build_model(tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, build_model(hparams).model.embed_tokens.weight)


def test_first_weights_take_the_memory_of_the_model_and_of_its_largest_module(hparams: HParams, live) -> None:
    with live() as building:
        model = build_model(hparams)
    sizes = [4 * one.numel() for one in model.parameters()]
    assert sum(sizes) <= building.most <= sum(sizes) + 1.1 * max(sizes)


def test_a_model_whose_class_leaves_weights_without_a_value_is_refused(hparams: HParams, monkeypatch) -> None:
    drawn = PreTrainedModel._init_weights

    def without_norms(self, module):
        if "Norm" not in type(module).__name__:
            drawn(self, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", without_norms)
    with pytest.raises(ConfigError, match=r"input_layernorm\.weight"):
        build_model(hparams)


def test_loss_is_that_of_transformers(model: PreTrainedModel, batches: np.ndarray) -> None:
    ids = torch.from_numpy(batches[0])
    assert batch_loss(model, batches[0]).item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-6)
    each = [batch_loss(model, batch).item() for batch in batches]
    assert mean_loss(model, batches) == pytest.approx(sum(each) / 4)
    assert mean_loss(model, batches) == pytest.approx(math.log(64), abs=0.2)  # untrained: about ln(vocabulary)
    with pytest.raises(ValueError, match="no batches"):
        mean_loss(model, batches[:0])


def test_gradient_is_the_mean_over_batches(model: PreTrainedModel, batches: np.ndarray) -> None:
    result = WindowGradient("float32").run(model, batches, step=0)
    model.zero_grad()
    (sum(batch_loss(model, batch) for batch in batches) / 4).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.tensors[name], parameter.grad)
    model.zero_grad()
    assert (result.train_stats.batches, result.train_stats.tokens, result.train_stats.skipped) == (4, batches.size, 0)
    assert result.train_stats.loss == pytest.approx(mean_loss(model, batches))


def test_a_gradient_in_bfloat16_is_near_and_not_the_same(model: PreTrainedModel, batches: np.ndarray) -> None:
    exact, short = (
        torch.cat([one.flatten() for one in WindowGradient(precision).run(model, batches, step=0).tensors.values()])
        for precision in ("float32", "bfloat16")
    )
    assert exact.dtype == short.dtype == torch.float32
    assert 0 < (exact - short).norm() < 0.1 * exact.norm()


def test_begins_no_batch_after_time_ran_out(model: PreTrainedModel, batches: np.ndarray) -> None:
    answers = iter([False, False, True])
    result = WindowGradient("float32").run(model, batches, step=0, stop=lambda: next(answers))
    assert result.train_stats.batches == 2
    torch.testing.assert_close(result.tensors, WindowGradient("float32").run(model, batches[:2], step=0).tensors)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batches_without_a_finite_loss_are_left_out(hparams: HParams, batches: np.ndarray) -> None:
    model = build_model(hparams)
    poisoned = batches.copy()
    poisoned[0] = 63
    poisoned[1:][poisoned[1:] == 63] = 0
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = math.inf
    result = WindowGradient("float32").run(model, poisoned, step=0)
    assert (result.train_stats.batches, result.train_stats.skipped) == (3, 1)
    assert math.isfinite(result.train_stats.loss)
    nothing = WindowGradient("float32").run(model, poisoned[:1], step=0)
    assert (nothing.train_stats.batches, nothing.train_stats.skipped, nothing.tensors) == (0, 1, {})


def test_fingerprint_sees_what_it_samples_and_digest_sees_all() -> None:
    rng = random.Random(3)
    parameters = {name: torch.randn(size) for name, size in (("b", (7, 5)), ("a", (11,)), ("c", (1,)))}
    shuffled = dict(rng.sample(sorted(parameters.items()), 3))
    total = 35 + 11 + 1
    before = fingerprints.fingerprint(parameters, step=3, seed=9, samples=20)
    whole = fingerprints.digest(parameters)
    assert before == fingerprints.fingerprint(shuffled, step=3, seed=9, samples=20)
    assert whole == fingerprints.digest(shuffled)
    assert before != fingerprints.fingerprint(parameters, step=3, seed=10, samples=20)
    assert before != fingerprints.fingerprint(parameters, step=4, seed=9, samples=20)

    seen = 0
    for name in ("a", "b", "c"):
        flat = parameters[name].view(-1)
        for i in range(flat.numel()):
            old = flat[i].item()
            flat[i] = old + 1e-3
            seen += fingerprints.fingerprint(parameters, step=3, seed=9, samples=20) != before
            assert fingerprints.digest(parameters) != whole
            flat[i] = old
    positions = {fingerprints.derive("position", 9, i) % total for i in range(20)}
    assert seen == len(positions)
    assert fingerprints.digest(parameters) == whole
