"""Hyperparameters and parameters of a model small enough to follow by hand."""

import pytest
import torch

from tplr.hparams import HParams

SHAPES = {"w.2": (24, 16), "w.1": (16, 32), "norm": (16,), "bias": (12,)}


@pytest.fixture
def hparams():
    def make(**changes) -> HParams:
        # The fields that DeMo reads; a whole file is the business of test_hparams.
        values = {
            "target_chunk": 8,
            "topk_compression": 5,
            "quantization_bits": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "t_max": 5,
            "momentum_decay": 0.9,
            "weight_decay": 0.0,
            "eval_lr_factor": 0.2,
        }
        return HParams.model_construct(**values | changes)

    return make


@pytest.fixture
def tensors():
    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    return make
