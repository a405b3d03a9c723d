"""Every supported type of model trains, packs, applies and evaluates with both schemes."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tplr.compress.payload import parse
from tplr.model_check import MODEL_TYPES
from tplr.training.device import DeviceSettings
from tplr.training.evaluation import baseline, evaluate, trial_step_applied
from tplr.training.fingerprint import digest
from tplr.training.loss import batch_loss, mean_loss, token_losses
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme


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


@pytest.mark.parametrize(
    "scheme", [*(pytest.param(one, marks=pytest.mark.long) for one in ("demo", "sparseloco")), "muon"]
)
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_trains_packs_applies_and_evaluates(model_type, scheme, hparams_of, batches):
    muon = {"inner_optimizer": "muon", "muon_momentum": 0.95} if scheme == "muon" else {}
    hparams = hparams_of(model_type, "sparseloco" if muon else scheme, **muon)
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
