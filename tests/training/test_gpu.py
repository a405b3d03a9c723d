"""A GPU with its own settings computes what the processor does, up to float32's rounding."""

from functools import partial

import pytest
import torch

from tplr.compress.payload import parse
from tplr.training.device import DeviceSettings
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEFAULT = {
    "inner_steps": 2,
    "batches_per_inner_step": 2,
    "inner_optimizer": "muon",
    "muon_momentum": 0.9,
    "expected_share": 0.1,
    "topk_selection": "group",
    "quantization_bits": 1,
}
RUNS = {
    "demo": ("demo", {}),
    "adamw": ("sparseloco", {"inner_steps": 2, "batches_per_inner_step": 2}),
    "default": ("sparseloco", DEFAULT),
}
OFFLOADED = {"offload_weights": True, "offload_error_feedback": True}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("offloads", [{}, OFFLOADED], ids=["", "offloaded"])
def test_windows_are_those_of_the_processor(run, offloads, tiny, batches):
    check(run, DeviceSettings.of("cuda", compile=False, **offloads), tiny, batches)


@pytest.mark.timeout(600)  # the compiler alone takes most of a minute
@pytest.mark.parametrize("run", RUNS)
def test_compiled_windows_are_those_of_the_processor(run, tiny, batches):
    check(run, DeviceSettings.of("cuda"), tiny, batches)


def check(run, settings, tiny, batches) -> None:
    scheme, changes = RUNS[run]
    hparams = tiny(scheme, precision="float32", **changes)
    expected, found = windows(hparams, "cpu", DeviceSettings(), batches), windows(hparams, "cuda", settings, batches)
    for first, second in zip(expected, found, strict=True):
        for name, tensor in second.items():
            apart = (tensor - first[name]).norm() / first[name].norm()
            assert apart < 1e-2, (name, apart)


def windows(hparams, device, settings, batches) -> list[dict[str, torch.Tensor]]:
    """Return the work of three windows, each trained from its expected weights, and the weights after them."""
    model = build_model(hparams, device, settings=settings)
    parameters = dict(model.named_parameters())
    local, outer = local_training(parameters, hparams, settings), outer_scheme(parameters, hparams, settings)
    found = []
    for step in range(3):
        expect = partial(outer.expected_step, own=None, step=step)
        work = local.run(model, batches(step), step=step, expect=expect)
        found.append({name: one.cpu().clone() for name, one in work.tensors.items()})
        about = {"step": step, "window": step, "uid": 1}
        body = outer.pack(work.tensors, **about, pages_digest="0" * 64, batches=work.train_stats.batches)
        outer.apply([parse(body, outer.spec, window=step, uid=1)], step=step)
    return [*found, {name: one.detach().cpu() for name, one in parameters.items()}]
