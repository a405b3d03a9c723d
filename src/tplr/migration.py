"""Names of documented networks that differ here: keys of ``hparams.json`` and arguments of nodes."""

from collections.abc import Iterable

GUIDE = "docs/migration.md"

# Old key -> its replacement.
HPARAMS = {
    "evaluation_bins": "documented_scores.evaluation_bins",
    "binary_score_ma_alpha": "documented_scores.binary_score_ma_alpha",
    "openskill_beta": "documented_scores.openskill_beta",
    "openskill_tau": "documented_scores.openskill_tau",
    "reset_inactive_windows": "documented_scores.reset_inactive_windows",
    "num_evaluation_bins": "documented_scores.evaluation_bins",
    "reset_inactivity_windows": "documented_scores.reset_inactive_windows",
    "active_check_interval": "nothing: active peers are looked up for each new peer list",
    "topk_peers": "max_topk_peers",
    "project": "the argument --wandb.project",
    "vocab_size": "model.vocab_size",
    "hidden_size": "model.hidden_size",
    "intermediate_size": "model.intermediate_size",
    "num_hidden_layers": "model.num_hidden_layers",
    "num_attention_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_key_value_heads",
    "max_position_embeddings": "model.max_position_embeddings",
    "activation_function": "model.hidden_act",
    "learning_rate": "demo.learning_rate.peak",
    "warmup_steps": "demo.learning_rate.warmup_steps",
    "t_max": "demo.learning_rate.t_max",
    "alpha_f": "demo.learning_rate.floor_factor",
    "momentum_decay": "demo.momentum_decay",
    "weight_decay": "demo.weight_decay",
    "inner_steps": "sparseloco.inner_steps",
    "inner_learning_rate": "sparseloco.inner_learning_rate.peak",
    "outer_learning_rate": "sparseloco.outer_learning_rate",
    "model.rope_theta": "model.rope_parameters.rope_theta",
    "model.rope_scaling": "model.rope_parameters, with rope_type for type, and with rope_theta",
}
# Old argument of a node -> its replacement.
ARGUMENTS = {
    "--project": "--wandb.project NAME",
    "--use_wandb": "--wandb.project NAME",
    "--store-gathers": "nothing: an aggregator publishes every window's updates",
    "--subtensor.chain_endpoint": "--subtensor.network URL",
    "--logging.debug": "--debug",
    "--logging.trace": "--trace",
}


def unknown_key(where: str, of: str = "") -> str:
    """Return the problem of a key of ``hparams.json`` that is not known, which names the replacement of an old one."""
    if where in HPARAMS:
        return f"{where} is an old key; write instead: {HPARAMS[where]} ({GUIDE} lists all)"
    return f"{where} is not a known key{of and f' {of}'}; remove it or correct its spelling"


def argument_hints(unknown: Iterable[str]) -> str:
    """Return a line for each old argument in ``unknown``; "" if there is none."""
    old = [name for name in (one.partition("=")[0] for one in unknown) if name in ARGUMENTS]
    lines = [f"\n  {name:28} -> {ARGUMENTS[name]}" for name in dict.fromkeys(old)]
    return "".join([*lines, f"\n  all old names: {GUIDE}"]) if lines else ""
