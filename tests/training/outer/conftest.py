"""Hyperparameters and parameters of a model small enough to follow by hand."""

import pytest
import torch

from tplr.hparams import DemoParams, HParams, LearningRate, SparselocoParams

SHAPES = {"w.2": (24, 16), "w.1": (16, 32), "norm": (16,), "bias": (12,)}


COMMON = {
    "precision": "float32",
    "target_chunk": 8,
    "topk_compression": 5,
    "quantization_bits": 2,
    "quantization_scale": "chunk",
    "quantization_codebook": "lloyd",
    "quantization_rounding": "nearest",
    "stale_after_windows": 9,
    "eval_lr_factor": 0.2,
    "topk_selection": "chunk",
}
SCHEDULE = {"peak": 1e-2, "warmup_steps": 3, "t_max": 5, "start_factor": 0.1, "floor_factor": 0.1}
DEMO = {"momentum_decay": 0.9, "weight_decay": 0.0}
SPARSELOCO = {
    "inner_optimizer": "adamw",
    "muon_momentum": None,
    "inner_steps": 3,
    "batches_per_inner_step": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "gradient_clip_norm": 1.0,
    "error_feedback_decay": 0.95,
    "outer_learning_rate": 0.5,
    "outer_learning_rate_points": (),
    "outer_momentum": 0.0,
    "outer_nesterov": False,
    "expected_share": 0.0,
}


@pytest.fixture(scope="module")
def hparams():
    """The fields that schemes read, flat; test_hparams covers whole files."""

    def make(scheme: str = "demo", **changes) -> HParams:
        group = DEMO if scheme == "demo" else SPARSELOCO
        # SparseLoCo's peak bounds the norm of an update: here, above those that tests send.
        usual = SCHEDULE if scheme == "demo" else SCHEDULE | {"peak": 10.0}
        schedule = LearningRate(**{key: changes.get(key, value) for key, value in usual.items()})
        own = {key: changes.get(key, value) for key, value in group.items()}
        common = {key: changes.get(key, value) for key, value in COMMON.items()}
        assert changes.keys() <= {*SCHEDULE, *group, *COMMON}
        if scheme == "demo":
            return HParams.model_construct(outer=scheme, demo=DemoParams(learning_rate=schedule, **own), **common)
        own["inner_learning_rate"] = schedule
        return HParams.model_construct(outer=scheme, sparseloco=SparselocoParams(**own), **common)

    return make


@pytest.fixture(scope="module")
def tensors():
    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    return make
