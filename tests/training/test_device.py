"""Every device setting gives the result of the plain path, up to float32's rounding."""

import numpy as np
import pytest
import torch

from tplr.training.device import DeviceSettings, host_copy
from tplr.training.layers import prepare_layers
from tplr.training.loss import batch_loss
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

SETTINGS = {
    "selective": DeviceSettings(checkpointing="selective"),
    "full": DeviceSettings(checkpointing="full"),
    "blocks of rows": DeviceSettings(loss_rows=5),
    "fused": DeviceSettings(fused_adamw=True),
    "copies ahead": DeviceSettings(copy_ahead=True),
    "weights in host memory": DeviceSettings(offload_weights=True),
}
COMPILED = {
    "compiled": DeviceSettings(compile=True),
    "compiled, checkpointed": DeviceSettings(compile=True, checkpointing="selective"),
}


@pytest.fixture
def work(tiny, batches):
    """Run two windows of SparseLoCo's inner steps; return the tensors of the second."""

    def run(settings: DeviceSettings) -> dict[str, torch.Tensor]:
        hparams = tiny("sparseloco", inner_steps=2, batches_per_inner_step=2)
        model = build_model(hparams)
        names = [name for name, _ in model.named_parameters()]
        prepare_layers(model, settings)
        assert [name for name, _ in model.named_parameters()] == names
        local = local_training(dict(model.named_parameters()), hparams, settings)
        local.run(model, batches(0), step=0)
        return local.run(model, batches(1), step=1).tensors

    return run


@pytest.mark.parametrize("which", SETTINGS)
def test_work_is_that_of_the_plain_path(which, work):
    check(work, SETTINGS[which])


@pytest.mark.long
@pytest.mark.timeout(600)  # the compiler alone takes a minute
@pytest.mark.parametrize("which", COMPILED)
def test_compiled_work_is_that_of_the_plain_path(which, work):
    check(work, COMPILED[which])


def check(work, settings: DeviceSettings) -> None:
    expected, found = work(DeviceSettings(loss_rows=10**6)), work(settings)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        apart = (tensor - expected[name]).norm() / expected[name].norm()
        assert apart < 1e-4, (name, apart)


@pytest.mark.parametrize(("checkpointing", "kept"), [("none", 1.0), ("selective", 0.8), ("full", 0.35)])
def test_checkpointing_keeps_less_for_the_backward_pass(checkpointing, kept, tiny):
    hparams = tiny("demo", layers=4)
    sizes = []
    for one in ("none", checkpointing):
        model = build_model(hparams)
        prepare_layers(model, DeviceSettings(checkpointing=one))
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = model.base_model(input_ids=torch.zeros(4, 64, dtype=torch.int64), use_cache=False)
        sizes.append(sum(saved.values()))
        del out
    assert sizes[1] <= kept * sizes[0]


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_casts_of_layers_that_are_computed_again_are_not_kept(checkpointing, tiny, live):
    """The peak memory of a pass grows with each layer by less than the layer's weights in bfloat16."""
    peaks, sizes = [], []
    for layers in (2, 6):
        hparams = tiny("demo", layers=layers, precision="bfloat16")
        wide = hparams.model.model_copy(update={"hidden_size": 128, "intermediate_size": 512})
        model = build_model(
            hparams.model_copy(update={"model": wide}), settings=DeviceSettings(checkpointing=checkpointing)
        )
        with live() as tensors:
            batch_loss(model, np.zeros((1, 8), np.int64), "bfloat16")
        peaks.append(tensors.most)
        sizes.append(sum(one.numel() for one in model.parameters()))
    assert peaks[1] - peaks[0] < 0.3 * 2 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
def test_error_feedback_in_host_memory_makes_the_same_updates(scheme, tiny, batches):
    hparams = tiny(scheme)
    bodies = []
    for offload in (False, True):
        model = build_model(hparams)
        parameters, settings = dict(model.named_parameters()), DeviceSettings(offload_error_feedback=offload)
        local, outer = local_training(parameters, hparams), outer_scheme(parameters, hparams, settings)
        for window in range(3):
            tensors = local.run(model, batches(window), step=window).tensors
            body = outer.pack(tensors, step=window, window=window, uid=1, pages_digest="0" * 64, batches=4)
            bodies.append(body)
            if window == 1:
                outer.restore(body, window=window, uid=1)
                state = outer.state_dict()
                outer.load_state_dict(state)
    assert bodies[:3] == bodies[3:]


def test_defaults_follow_the_type_of_the_device():
    assert DeviceSettings.of("cpu") == DeviceSettings()
    assert DeviceSettings.of("cuda:1").compile
    assert DeviceSettings.of("cuda", compile=None).compile
    assert not DeviceSettings.of("cuda", compile=False).compile
    assert DeviceSettings.of("cpu", loss_rows=7).loss_rows == 7


def test_a_host_copy_is_the_callers_own():
    tensor = torch.arange(3.0)
    copy = host_copy(tensor)
    tensor += 1
    assert copy.tolist() == [0, 1, 2]
    assert copy.device.type == "cpu"
