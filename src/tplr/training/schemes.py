"""The two halves of the run's scheme, chosen by ``hparams.outer``: what a miner does alone, and what all do alike."""

from collections.abc import Mapping

import torch

from tplr.compress.layout import PayloadSpec
from tplr.hparams import HParams
from tplr.training.gradient import WindowGradient
from tplr.training.inner import InnerLoop
from tplr.training.local import LocalTraining
from tplr.training.outer.base import OuterScheme
from tplr.training.outer.demo import DemoOuter
from tplr.training.outer.sparseloco import SparselocoOuter


def local_training(parameters: Mapping[str, torch.Tensor], hparams: HParams) -> LocalTraining:
    """From a window's batches to the tensors that are packed."""
    return WindowGradient(hparams.precision) if hparams.outer == "demo" else InnerLoop(parameters, hparams)


def outer_scheme(parameters: Mapping[str, torch.Tensor], hparams: HParams) -> OuterScheme:
    """From those tensors to an update, and from everyone's updates to a step of ``parameters``."""
    return DemoOuter(parameters, hparams) if hparams.outer == "demo" else SparselocoOuter(parameters, hparams)


def payload_spec(hparams: HParams) -> PayloadSpec:
    """What the run's updates look like, without the memory that its model takes."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(hparams.model_config_for_transformers())
    return outer_scheme(dict(model.named_parameters()), hparams).spec
