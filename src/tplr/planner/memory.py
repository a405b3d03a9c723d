"""Computes bytes on each device and on the host, by kind, at a window's peak.

Formulas of activations: bytes that a decoder layer keeps for the backward pass per token, in bfloat16, for hidden size
``d``, query and key widths ``q`` and ``k``, MLP width ``f`` and ``h`` heads. They count the tensors that autograd saves
for RMSNorm, gated MLP and scaled dot-product attention; ``tests/planner/test_memory.py`` compares the uncompiled
formula with the bytes that PyTorch saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tplr.planner.workload import Workload
from tplr.training.device import DeviceSettings

Role = Literal["miner", "validator"]

FLOAT32 = 4
FLOAT32_ACTIVATIONS = 1.65  # relative to bfloat16, which also keeps casts; counted at toy size
CONTEXT = 1.5 * 2**30  # CUDA context, library workspaces
FRAGMENTATION = 0.05  # share of temporary tensors with varying sizes
TEMPORARY = ("activations", "loss", "bfloat16 weights", "gathered weights", "largest tensor")
PYTHON = 2**30  # a process with PyTorch and its libraries, page text and batches
WINDOWS_IN_FLIGHT = 3  # during catch-up, two windows are fetched ahead of the one that is applied


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by kind.

    Attributes:
        device: bytes of each rank, persistent and temporary; not all temporary kinds exist at once.
        training, exchanging: the kinds that exist during a forward and backward pass, and during the outer step.
        host: bytes of the host.
    """

    device: dict[str, int]
    training: tuple[str, ...]
    exchanging: tuple[str, ...]
    host: dict[str, int]

    @property
    def peak(self) -> int:
        """Peak bytes of a rank, including the allocator's fragmentation."""
        return int(max(sum(map(self._with_fragments, kinds)) for kinds in (self.training, self.exchanging)))

    def _with_fragments(self, kind: str) -> float:
        return self.device.get(kind, 0) * (1 + FRAGMENTATION if kind in TEMPORARY else 1)


def activations_per_token(load: Workload, settings: DeviceSettings) -> tuple[float, float]:
    """Return the bytes that all layers keep per token, and the bytes that one layer needs for recomputation."""
    model = load.hparams.model
    d, f, h = model.hidden_size, model.intermediate_size, model.num_attention_heads
    q, k = h * model.head_size, model.num_key_value_heads * model.head_size
    whole = 8 * d + 4 * q + 4 * k + 6 * f + 4 * h if settings.compile else 20 * d + 6 * q + 6 * k + 8 * f
    kept = {"none": whole, "selective": 6 * d + 4 * q + 4 * k + 4 * f, "full": 2 * d}[settings.checkpointing]
    scale = 1.0 if load.hparams.precision == "bfloat16" else FLOAT32_ACTIVATIONS
    again = 0 if settings.checkpointing == "none" else whole
    return scale * kept * model.num_hidden_layers, scale * again


def device_memory(load: Workload, role: Role, settings: DeviceSettings, *, ranks: int, on_cpu: bool) -> Memory:
    """Compute the memory of one rank of ``ranks``."""
    hparams, shard = load.hparams, -(-load.parameters // ranks)
    inner = role == "miner" and hparams.sparseloco is not None
    # A validator computes a gradient, too, but under the profile that measures losses alone.
    backward = role == "miner" or hparams.profile != "documented"
    tokens = hparams.batch_size * hparams.sequence_length
    kept, again = activations_per_token(load, settings)
    tables, layers = _whole(load)
    whole = load.parameters if ranks == 1 else tables + layers
    device = {"weights": FLOAT32 * shard}
    if backward:
        device["gradients"] = FLOAT32 * shard
    if role == "validator":
        # A copy, restored after trial steps and half of the window's step. One gradient is computed after the latter.
        device["trial weights"] = FLOAT32 * shard
    if role == "miner":
        device["error feedback"] = FLOAT32 * load.owned(ranks)
        if inner:
            # AdamW has two moments, Muon one.
            device["moments"] = FLOAT32 * (2 * shard - sum(load.tensors[name] for name in load.muon) // ranks)
            device["weights before"] = FLOAT32 * shard
    held = kept + again if backward else max(again, kept / hparams.model.num_hidden_layers)
    device["activations"] = int(tokens * held)
    if hparams.sparseloco and hparams.sparseloco.outer_momentum:
        device["outer momentum"] = FLOAT32 * load.owned(ranks)
    if hparams.precision == "bfloat16":
        # Autograd keeps the casts of all layers, unless it recomputes them.
        keeps = backward and settings.checkpointing == "none"
        device["bfloat16 weights"] = 2 * (whole if keeps else min(whole, tables + layers))
    if ranks > 1:
        bfloat16 = role == "miner" and settings.gather_bfloat16 and hparams.precision == "bfloat16"
        device["gathered weights"] = FLOAT32 * (tables if bfloat16 else whole)
    # A block's logits, their values and gradient in float32, and the gradient of the last layer.
    vocabulary, rows = hparams.model.vocab_size, min(tokens, settings.loss_rows)
    device["loss"] = 10 * rows * vocabulary + (4 * vocabulary * hparams.model.hidden_size if backward else 0)
    # The owner of the largest tensor: its whole weights and float64 sums of a row block; peers' entries of it.
    device["largest tensor"] = 2 * FLOAT32 * load.largest + 12 * load.most_sent * hparams.max_topk_peers
    if not on_cpu:
        device["context"] = int(CONTEXT)
    moved = {"error feedback": settings.offload_error_feedback, "weights before": settings.offload_weights}
    offloaded = {kind: device.pop(kind) for kind, yes in moved.items() if yes and kind in device}
    always = tuple(kind for kind in device if kind not in ("gradients", *TEMPORARY))
    host = {"processes": PYTHON * ranks, "updates in flight": _in_flight(load)}
    if inner and hparams.outer_delay:
        # Training continues while its state is saved from copies; the copies of the weights are the previous weights.
        host["moments being saved"] = device["moments"] * ranks
    host |= {f"{kind} (offloaded)": size * ranks for kind, size in offloaded.items()}
    return Memory(
        device=device,
        training=(*always, "gradients", "activations", "loss", "bfloat16 weights", "gathered weights"),
        exchanging=(*always, "gradients", "largest tensor"),
        host=host,
    )


def _whole(load: Workload) -> tuple[int, int]:
    """Return the numbers of parameters that are whole or cast at a time: the vocabulary's, and those of two layers.

    One of the two layers is prefetched.
    """
    model = load.hparams.model
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return tables, 2 * (load.parameters - tables) // model.num_hidden_layers


def _in_flight(load: Workload) -> int:
    hparams = load.hparams
    return load.update_bytes * (hparams.max_topk_peers + hparams.reserve_peers) * WINDOWS_IN_FLIGHT
