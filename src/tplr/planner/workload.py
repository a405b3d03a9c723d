"""Computes sizes from a run's constants: parameters, tokens and FLOPs of a window, bytes of an update."""

from __future__ import annotations

from dataclasses import dataclass

from tplr.hparams import HParams
from tplr.training.inner_optimizers import is_hidden_matrix, newton_schulz_flops
from tplr.training.schemes import payload_spec

# For a page of 100 rows of web text; a run with another dataset sets its own figure.
TOKENS_PER_PAGE = 60_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run's sizes.

    Attributes:
        tensors: number of parameters of each tensor, by name.
        matmul_parameters: number of parameters in matrices that multiply a token's activations: all except vectors,
            the embedding lookup, and experts that the token does not use.
        flops_per_token: FLOPs of forward and backward pass: ``6 * matmul_parameters + 12 * layers * heads * head size *
            sequence length``. The second term counts attention to all positions, as in PaLM (arXiv 2204.02311, appendix
            B), torchtitan and nanochat; a causal kernel computes half of it. Recomputation does not count.
        tokens: number of tokens that a miner trains on in a window.
        update_bytes: size of a packed update.
        most_sent: number of entries of one tensor in an update; of the tensor with the most.
        muon: the part of ``tensors`` that Muon steps.
        muon_flops: FLOPs of Muon's matrix products in all inner steps of a window.
    """

    hparams: HParams
    tensors: dict[str, int]
    matmul_parameters: int
    flops_per_token: float
    tokens: int
    update_bytes: int
    most_sent: int
    muon: tuple[str, ...] = ()
    muon_flops: float = 0.0

    @classmethod
    def of(cls, hparams: HParams, *, tokens_per_page: int = TOKENS_PER_PAGE) -> Workload:
        """Compute the sizes of a run. Builds the model without memory for its weights."""
        spec, model = payload_spec(hparams), hparams.model
        tensors = {name: one.grid.rows * one.grid.cols for name, one in spec.tensors.items()}
        table = model.vocab_size * model.hidden_size
        matmul = sum(tensors[name] for name, one in spec.tensors.items() if one.grid.rows > 1)
        # A tied embedding also multiplies activations, as the head; an untied one is only looked up.
        matmul -= 0 if model.tie_word_embeddings else table
        of_experts = sum(size for name, size in tensors.items() if ".experts." in name)
        if of_experts:  # a token uses only some of them; the numbers may be those of transformers
            config = hparams.model_config_for_transformers()
            matmul -= of_experts - of_experts * config.num_experts_per_tok // config.num_experts
        queries = model.num_attention_heads * model.head_size
        attention = 12 * model.num_hidden_layers * queries * hparams.sequence_length
        muon = _muon_shapes(hparams, {name: one.grid.shape for name, one in spec.tensors.items()})
        inner_steps = hparams.sparseloco.inner_steps if hparams.sparseloco else 0
        return cls(
            hparams=hparams,
            tensors=tensors,
            matmul_parameters=matmul,
            flops_per_token=6.0 * matmul + attention,
            tokens=_tokens(hparams, tokens_per_page),
            update_bytes=spec.expected_size,
            most_sent=max(one.grid.chunks * one.k for one in spec.tensors.values()),
            muon=tuple(muon),
            muon_flops=float(inner_steps * sum(newton_schulz_flops(name, shape) for name, shape in muon.items())),
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(self.tensors.values())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the state that all nodes share, as in a checkpoint: weights, and an outer momentum."""
        constants = self.hparams.sparseloco
        return 4 * self.parameters * (2 if constants and constants.outer_momentum else 1)

    @property
    def largest(self) -> int:
        """Number of parameters of the largest tensor."""
        return max(self.tensors.values())

    def owned(self, ranks: int) -> int:
        """Return the parameters of the rank that owns most; tensors go by falling size to the rank with the fewest."""
        loads = [0] * ranks
        for size in sorted(self.tensors.values(), reverse=True):
            loads[loads.index(min(loads))] += size
        return max(loads)


def _muon_shapes(hparams: HParams, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if hparams.sparseloco is None or hparams.sparseloco.inner_optimizer != "muon":
        return {}
    return {name: shape for name, shape in shapes.items() if is_hidden_matrix(name, shape)}


def _tokens(hparams: HParams, tokens_per_page: int) -> int:
    batch = hparams.batch_size * hparams.sequence_length
    if hparams.store:
        found = hparams.store.samples_per_window * hparams.sequence_length
    else:
        found = hparams.pages_per_window * tokens_per_page // batch * batch
    if hparams.sparseloco:
        found = min(found, hparams.sparseloco.inner_steps * hparams.sparseloco.batches_per_inner_step * batch)
    return found
