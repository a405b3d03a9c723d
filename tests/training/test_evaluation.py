"""Losses per sequence, measured on a model that a trial step changes and then restores."""

import copy

import numpy as np
import pytest
import torch

from tplr.compress import chunks
from tplr.compress.payload import parse
from tplr.errors import TrainingError
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node.train_state import TrainState
from tplr.training.device import DeviceSettings
from tplr.training.evaluation import UNKNOWN, baseline, evaluate, sequence_losses, trial_step_applied
from tplr.training.fingerprint import digest
from tplr.training.loss import mean_loss
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

STEP = 3


@pytest.fixture(scope="module")
def hparams():
    model = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 128}
    profile = HParams.model_validate(scheme_constants("demo"))
    return profile.model_copy(update={"model": profile.model.model_copy(update=model)})


@pytest.fixture(scope="module")
def batches() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 128, (4, 2, 32))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, hparams):
    tied = hparams.model.model_copy(update={"tie_word_embeddings": request.param})
    return build_model(hparams.model_copy(update={"model": tied}))


@pytest.fixture(scope="module")
def outer(model, hparams):
    return outer_scheme(dict(model.named_parameters()), hparams)


@pytest.fixture(scope="module")
def update(model, outer, hparams, batches):
    work = local_training(outer._parameters, hparams).run(model, batches[:2], step=STEP)
    body = outer.pack(work.tensors, step=STEP, window=7, uid=5, pages_digest="0" * 64, batches=2)
    return parse(body, outer.spec, window=7, uid=5)


def test_sequences_have_the_loss_of_the_whole(model, batches) -> None:
    losses = sequence_losses(model, batches, "float32")
    assert losses.shape == (8,)
    assert losses.mean() == pytest.approx(mean_loss(model, batches), rel=1e-6)
    assert losses[3] == pytest.approx(mean_loss(model, batches[1:2, 1:2]), rel=1e-5)
    with pytest.raises(ValueError, match="no batches"):
        sequence_losses(model, batches[:0], "float32")


def test_a_node_measures_in_its_own_row_blocks(hparams, batches, tmp_path, monkeypatch) -> None:
    rows, compute = set(), torch.nn.functional.cross_entropy

    def recorded(logits, *args, **kwargs):
        rows.add(len(logits))
        return compute(logits, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", recorded)
    state = TrainState(build_model(hparams), hparams, tmp_path, DeviceSettings(loss_rows=16))
    state.train(batches[:1], 7)
    sent = parse(state.pack(window=7, uid=5, pages_digest="0" * 64, batches=1), state.spec, window=7, uid=5)
    rows.clear()
    held_out = state.baseline(batches[2:])
    state.evaluate(sent, batches[:2], held_out)
    assert rows == {16}


@pytest.mark.parametrize("entries", [2**18, 2**11])
def test_a_trial_step_is_taken_in_the_context_and_no_byte_of_it_is_left(
    hparams, model, outer, update, batches, monkeypatch, entries
) -> None:
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", entries)
    before, plain = digest(dict(model.named_parameters())), sequence_losses(model, batches, "float32")
    stepped = copy.deepcopy(model)
    outer_scheme(dict(stepped.named_parameters()), hparams).trial_step(update, step=STEP)
    expected = sequence_losses(stepped, batches, "float32")
    assert abs(expected - plain).min() > 1e-4
    with trial_step_applied(model, outer, update, step=STEP):
        np.testing.assert_array_equal(sequence_losses(model, batches, "float32"), expected)
        assert digest(dict(model.named_parameters())) == digest(dict(stepped.named_parameters()))
    np.testing.assert_array_equal(sequence_losses(model, batches, "float32"), plain)
    assert digest(dict(model.named_parameters())) == before


def test_a_failure_in_the_middle_of_a_pass_leaves_the_model_as_it_was(model, outer, update, batches) -> None:
    before, plain = digest(dict(model.named_parameters())), sequence_losses(model, batches, "float32")
    too_large = np.full_like(batches, 10**6)  # no such token

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = model.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"), trial_step_applied(model, outer, update, step=STEP):
        sequence_losses(model, batches, "float32")
    handle.remove()
    with pytest.raises(IndexError), trial_step_applied(model, outer, update, step=STEP):
        sequence_losses(model, too_large, "float32")
    assert digest(dict(model.named_parameters())) == before
    np.testing.assert_array_equal(sequence_losses(model, batches, "float32"), plain)


def test_evaluation(model, outer, update, batches) -> None:
    random = baseline(model, batches[2:], "float32")
    found = evaluate(model, outer, update, step=STEP, assigned=batches[:2], held_out=random, precision="float32")
    assert (found.assigned.sequences, found.held_out.sequences) == (4, 4)
    assert found.assigned.before == pytest.approx(mean_loss(model, batches[:2]), rel=1e-6)
    assert found.held_out.before == pytest.approx(mean_loss(model, batches[2:]), rel=1e-6)
    assert found.assigned.after is not None
    assert found.held_out.after is not None
    # It was trained on these, and random tokens teach nothing of other random tokens.
    assert found.assigned.before - found.assigned.after > found.held_out.before - found.held_out.after
    with trial_step_applied(model, outer, update, step=STEP):
        after = sequence_losses(model, batches[2:], "float32")
    assert found.held_out.error == pytest.approx((random.losses - after).std(ddof=1) / 2, rel=1e-9)
    lone = evaluate(model, outer, update, step=STEP, assigned=batches[:1, :1], held_out=random, precision="float32")
    assert lone.assigned.error == UNKNOWN


@pytest.mark.parametrize(("count", "read"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_calibration_reads_a_quarter_of_the_held_out_batches(model, outer, update, batches, count, read) -> None:
    held_out = baseline(model, np.concatenate([batches, batches])[:count], "float32")
    found = evaluate(model, outer, update, step=STEP, assigned=None, held_out=held_out, precision="float32")
    rows = batches.shape[1]
    assert found.assigned is None
    assert found.held_out.sequences == read * rows
    assert found.held_out.before == held_out.losses[: read * rows].mean()
    with trial_step_applied(model, outer, update, step=STEP):
        after = sequence_losses(model, batches[:read], "float32")
    assert found.held_out.after == after.mean()


def test_losses_that_are_not_finite(model, outer, update, batches) -> None:
    random = baseline(model, batches[2:], "float32")

    class Ruinous:
        @staticmethod
        @torch.no_grad()
        def trial_step(update, *, step):
            for parameter in model.parameters():
                parameter.fill_(torch.inf)

    found = evaluate(model, Ruinous(), update, step=STEP, assigned=batches[:2], held_out=random, precision="float32")
    assert (found.assigned.after, found.held_out.after) == (None, None)
    ruined = torch.nn.utils.stateless._reparametrize_module
    with (
        ruined(model, {"model.norm.weight": torch.full((64,), torch.nan)}),
        pytest.raises(TrainingError, match="no update can be measured"),
    ):
        baseline(model, batches, "float32")


def test_memory_is_that_of_a_copy_of_the_weights_and_of_one_tensor(hparams, live, monkeypatch) -> None:
    """In addition to a plain pass, at the peak; the pass is short, so that its own memory does not hide that of
    decoding.

    A row block is a sixteenth of the largest tensor, a larger share than in a large model.
    """
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 2**16)
    size = {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    model = build_model(hparams.model_copy(update={"model": hparams.model.model_copy(update=size)}))
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    outer = outer_scheme(parameters, hparams)
    gradients = {name: torch.randn_like(one) for name, one in parameters.items()}
    body = outer.pack(gradients, step=1, window=1, uid=1, pages_digest="0" * 64, batches=1)
    update = parse(body, outer.spec, window=1, uid=1)
    short = np.zeros((1, 1, 4), dtype=np.int64)
    with live() as plain:
        sequence_losses(model, short, "float32")
    with live() as trial_step, trial_step_applied(model, outer, update, step=1):
        sequence_losses(model, short, "float32")
    sizes = [4 * one.numel() for one in parameters.values()]
    assert sum(sizes) < trial_step.most - plain.most <= sum(sizes) + max(sizes)


@pytest.mark.long
@pytest.mark.timeout(600)  # the compiler alone takes a minute
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [False], indirect=True, ids=["untied"])
def test_a_compiled_model_measures_the_same(hparams, update, batches, precision) -> None:
    """The compiled layers use the weights of the trial step, and afterwards the previous ones."""
    found = []
    for settings in (DeviceSettings(), DeviceSettings(compile=True)):
        model = build_model(hparams, settings=settings)
        outer = outer_scheme(dict(model.named_parameters()), hparams)
        held_out = baseline(model, batches[2:], precision)
        found.append(
            evaluate(model, outer, update, step=STEP, assigned=batches[:2], held_out=held_out, precision=precision)
        )
        after = baseline(model, batches[2:], precision).losses
        np.testing.assert_array_equal(after, held_out.losses)
    plain, compiled = found
    one, other = plain.assigned, compiled.assigned
    assert one.after is not None
    assert abs(one.before - one.after) > 1e-3
    near = {"float32": 1e-5, "bfloat16": 2e-3}[precision]
    for pages in ("assigned", "held_out"):
        for name, value in getattr(plain, pages).model_dump().items():
            assert getattr(getattr(compiled, pages), name) == pytest.approx(value, abs=near), (pages, name)
    # Scores follow from this difference.
    difference = (one.before - one.after) - (other.before - other.after)
    assert abs(difference) < 0.1 * one.error
