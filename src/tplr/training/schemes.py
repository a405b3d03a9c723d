"""Creates the two parts of the run's scheme by ``hparams.outer``: local training and the outer scheme."""

from collections.abc import Mapping

import torch

from tplr.compress.layout import PayloadSpec
from tplr.hparams import HParams
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.gradient import WindowGradient
from tplr.training.inner import InnerLoop
from tplr.training.local import LocalTraining
from tplr.training.model import meta_model
from tplr.training.outer.base import OuterScheme
from tplr.training.outer.demo import DemoOuter
from tplr.training.outer.sparseloco import SparselocoOuter
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext


def local_training(
    parameters: Mapping[str, torch.Tensor],
    hparams: HParams,
    settings: DeviceSettings = DEFAULTS,
    parallel: ParallelContext = SINGLE_PROCESS,
) -> LocalTraining:
    """Create the scheme's local training, which converts a window's batches to tensors."""
    if hparams.outer == "demo":
        return WindowGradient(hparams.precision, settings, parallel)
    return InnerLoop(parameters, hparams, settings, parallel)


def outer_scheme(
    parameters: Mapping[str, torch.Tensor],
    hparams: HParams,
    settings: DeviceSettings = DEFAULTS,
    parallel: ParallelContext = SINGLE_PROCESS,
) -> OuterScheme:
    """Create the outer scheme, which converts tensors to an update, and updates to a step of ``parameters``."""
    scheme = DemoOuter if hparams.outer == "demo" else SparselocoOuter
    return scheme(parameters, hparams, settings, parallel)


def payload_spec(hparams: HParams) -> PayloadSpec:
    """Return the layout of the run's updates; allocates no memory for the model."""
    return PayloadSpec.from_hparams({name: one.shape for name, one in meta_model(hparams).named_parameters()}, hparams)
