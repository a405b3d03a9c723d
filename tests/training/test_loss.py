"""The loss in blocks of rows against plain PyTorch: values, gradients, memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tplr.training.device import DeviceSettings
from tplr.training.loss import batch_loss, token_losses
from tplr.training.model import build_model


def plain(model, batch, limit: float | None = None) -> torch.Tensor:
    """Mean cross-entropy of all logits at once."""
    ids = torch.from_numpy(batch)
    logits = model(input_ids=ids).logits
    if limit:
        logits = limit * torch.tanh(logits / limit)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rows", [1, 5, 24, 1000])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_gradient_in_blocks_is_that_of_all_logits(rows, limit, tiny, batches):
    model = build_model(tiny("demo", layers=1))
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # logits that a bound of 2 changes
    model.config.final_logit_softcapping = limit
    (batch,) = batches(0, 1)
    expected_loss = plain(model, batch, limit)
    expected = gradients(model, 3 * expected_loss)
    loss = batch_loss(model, batch, settings=DeviceSettings(loss_rows=rows))
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients(model, 3 * loss).items():
        assert (gradient - expected[name]).norm() < 1e-6 * expected[name].norm(), name


def test_losses_of_tokens_are_those_of_all_logits(tiny, batches):
    model = build_model(tiny("demo", layers=1))
    (batch,) = batches(0, 1)
    ids = torch.from_numpy(batch)
    logits = model(input_ids=ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, -1)
    for rows in (1, 7, 1000):
        losses = token_losses(model, batch, settings=DeviceSettings(loss_rows=rows))
        torch.testing.assert_close(losses, expected)
        with torch.no_grad():
            torch.testing.assert_close(batch_loss(model, batch), expected.mean())


def test_bfloat16_keeps_the_loss_in_float32(tiny, batches):
    """A loss rounded to bfloat16 would have eight bits."""
    model = build_model(tiny("demo", layers=1))
    (batch,) = batches(0, 1)
    loss = batch_loss(model, batch, "bfloat16")
    assert loss.dtype == token_losses(model, batch, "bfloat16").dtype == torch.float32
    assert loss.item() != loss.bfloat16().item()
    assert loss.item() == pytest.approx(plain(model, batch).item(), rel=1e-3)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32, name


def test_tied_tables_get_both_gradients(tiny, batches):
    hparams = tiny("demo", layers=1)
    tied = hparams.model.model_copy(update={"tie_word_embeddings": True})
    model = build_model(hparams.model_copy(update={"model": tied}))
    (batch,) = batches(0, 1)
    expected = gradients(model, plain(model, batch))
    for name, gradient in gradients(model, batch_loss(model, batch)).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_a_second_backward_pass_is_refused(tiny, batches):
    model = build_model(tiny("demo", layers=1))
    loss = batch_loss(model, batches(0, 1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(AttributeError, match="gradients"):
        loss.backward()


@pytest.mark.parametrize("training", [True, False])
def test_logits_of_a_batch_never_exist_together(training, tiny, live):
    """V = 32,768, in blocks of 64 of 512 rows."""
    hparams = tiny("demo", layers=1)
    wide = hparams.model.model_copy(update={"vocab_size": 2**15, "max_position_embeddings": 512})
    model = build_model(hparams.model_copy(update={"model": wide}))
    batch = np.random.default_rng(0).integers(0, 2**15, (1, 512))
    with live() as memory, torch.set_grad_enabled(training):
        loss = batch_loss(model, batch, settings=DeviceSettings(loss_rows=64))
        if training:
            loss.backward()
    all_logits = batch.size * 2**15 * 4
    # In training, the gradient of the table is added to the block: 16 MiB of 64.
    assert memory.most < all_logits * (0.4 if training else 0.3)
    with live() as memory:
        plain(model, batch)
    assert memory.most > 1.9 * all_logits
