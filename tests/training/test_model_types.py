"""Every supported type of model trains, packs, applies and evaluates with both schemes."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tplr.compress.payload import parse
from tplr.hparams import MODEL_TYPES, HParams
from tplr.training.device import DeviceSettings
from tplr.training.evaluation import baseline, evaluate, trial_step_applied
from tplr.training.fingerprint import digest
from tplr.training.loss import batch_loss, mean_loss, token_losses
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

# What makes each type differ from Llama, at toy size.
MORE = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
RATE = {"peak": 2e-3, "warmup_steps": 1, "t_max": 100, "start_factor": 0.5, "floor_factor": 0.1}


@pytest.fixture
def hparams_of(tiny):
    def make(model_type: str, scheme: str) -> HParams:
        rate = {"learning_rate" if scheme == "demo" else "inner_learning_rate": RATE}
        raw = tiny(scheme, **rate).model_dump()
        activation = raw["model"].pop("hidden_act")
        tied = {"tie_word_embeddings": model_type == "gemma3_text"}
        raw["model"] |= (
            {"model_type": model_type, MODEL_TYPES[model_type]: activation} | MORE.get(model_type, {}) | tied
        )
        return HParams.model_validate(raw)

    return make


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_loss_and_gradient_are_those_of_transformers(model_type, hparams_of, batches):
    model = build_model(hparams_of(model_type, "demo"))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    (batch,) = batches(0, 1)
    ids = torch.from_numpy(batch)
    logits = model(input_ids=ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(token_losses(model, batch).mean(), expected)
    expected.backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    batch_loss(model, batch, settings=DeviceSettings(loss_rows=7)).backward()
    for name, gradient in gradients_of(model).items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_trains_packs_applies_and_evaluates(model_type, scheme, hparams_of, batches):
    hparams = hparams_of(model_type, scheme)
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    local, outer = local_training(parameters, hparams), outer_scheme(parameters, hparams)
    pages = batches(0, 2)
    first = mean_loss(model, pages)
    for window in range(6):
        work = local.run(model, pages, step=window)
        body = outer.pack(work.tensors, step=window, window=window, uid=1, pages_digest="0" * 64, batches=2)
        update = parse(body, outer.spec, window=window, uid=1)
        before = digest(parameters)
        with trial_step_applied(model, outer, update, step=window):
            trial = token_losses(model, pages[0]).mean()
        found = evaluate(
            model,
            outer,
            update,
            step=window,
            assigned=pages,
            held_out=baseline(model, pages, "float32"),
            precision="float32",
        )
        assert digest(parameters) == before
        assert found.assigned.after is not None
        assert found.assigned.after < found.assigned.before
        # A trial step is the step taken: the same loss as with the moved weights in the parameters.
        moved = copy.deepcopy(model)
        other = outer_scheme(dict(moved.named_parameters()), hparams)
        other.load_shared({name: one for name, one in outer.state_dict()["tensors"].items() if "shared." in name})
        other.trial_step(update, step=window)
        torch.testing.assert_close(trial, token_losses(moved, pages[0]).mean())
        outer.apply([update], step=window)
    assert mean_loss(model, pages) < first - 0.05
