"""Run constants for simulated networks: models of 1B, 8B and 70B parameters, windows of 20 minutes."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

from tplr.hparams import HParams
from tplr.planner.workload import Workload

Size = Literal["1B", "8B", "70B"]
SIZES: tuple[Size, ...] = get_args(Size)

# Hidden size, MLP, layers, heads, key heads, vocabulary: Llama 3's, except for 1B, which is hparams-sparseloco.json's.
_SHAPES: dict[Size, tuple[int, int, int, int, int, int]] = {
    "1B": (2048, 8192, 16, 8, 8, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
BLOCK_SECONDS = 12.0
# Upload time bound for each size, in seconds: enough for a slow link of the design case, see docs/scale.md.
_BOUNDS: dict[Size, float] = {"1B": 70.0, "8B": 100.0, "70B": 300.0}


def run_constants(size: Size, **changes: Any) -> HParams:
    """Return SparseLoCo constants: windows of 100 blocks, 20 peers, 10 reserve peers; ``changes`` replace fields."""
    hidden, mlp, layers, heads, key_heads, vocabulary = _SHAPES[size]
    fields: dict[str, Any] = {
        "spec_version": 1,
        "profile": "hardened",
        "tokenizer_name": "none",
        "model": {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
        },
        "init_seed": 42,
        "sequence_length": 2048,
        "batch_size": 6,
        "precision": "bfloat16",
        "data": "pages",
        "pages_per_window": 200,
        "page_address": "exact",
        "blocks_per_window": 100,
        "time_window_delta_seconds": _BOUNDS[size],
        "commit_margin_seconds": 15,
        "gather_patience_seconds": 30,
        "manifest_timeout_seconds": 10,
        "relay_seconds": 2.0,
        "elector_stake_share": 0.02,
        "require_commit": True,
        "gradient_retention_windows": 100,
        "checkpoint_frequency": 100,
        "checkpoints_kept": 3,
        "checkpoint_init_version": None,
        "outer": "sparseloco",
        "sparseloco": {
            "inner_steps": 30,
            "batches_per_inner_step": 32,
            "inner_learning_rate": {
                "peak": 1.17e-4,
                "warmup_steps": 1500,
                "t_max": 140000,
                "start_factor": 0.1,
                "floor_factor": 0.1,
            },
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.1,
            "gradient_clip_norm": 1.0,
            "error_feedback_decay": 0.95,
            "outer_learning_rate": 0.4,
            "outer_momentum": 0.0,
            "outer_nesterov": False,
        },
        "topk_compression": 64,
        "target_chunk": 64,
        "quantization_bits": 1,
        "quantization_scale": "chunk",
        "quantization_codebook": "lloyd",
        "quantization_rounding": "nearest",
        "stale_after_windows": 25,
        "minimum_peers": 5,
        "max_topk_peers": 20,
        "reserve_peers": 10,
        "peer_replacement_frequency": 5,
        "peer_list_window_margin": 2,
        "recent_windows": 5,
        "probation_windows": 3,
        "eval_stake_limit": 20000,
        "validator_offset": 2,
        "uids_per_window": 8,
        "validator_sample_rate": 0.1,
        "evaluation_sequences": 64,
        "eval_lr_factor": 0.2,
        "pay_windows": 20,
        "sync_max_steps_behind": 3,
        "power_normalisation": 1.0,
        "windows_per_weights": 3,
        "sealed_scores": True,
        "fingerprint_samples": 256,
        "digest_interval_windows": 10,
    }
    return HParams.model_validate(fields | changes)


@functools.cache
def workload(size: Size) -> Workload:
    """Return the workload of a size: parameters, FLOPs, and bytes of an update by the layout that nodes use."""
    return Workload.of(run_constants(size))
