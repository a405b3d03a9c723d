"""Checks that ``transformers`` can build a model of given values. The library is imported by the functions only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tplr.migration import unknown_key
from tplr.untrusted import printable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Model types that tests cover (train, pack, apply, evaluate), and the key of each type's activation function.
MODEL_TYPES = {
    "gemma3_text": "hidden_activation",
    "llama": "hidden_act",
    "mistral": "hidden_act",
    "olmo2": "hidden_act",
    "qwen3": "hidden_act",
    "qwen3_moe": "hidden_act",
}
# Types whose heads have ``hidden_size / num_attention_heads`` entries: their configurations have no ``head_dim``.
FIXED_HEAD_DIM = frozenset({"olmo2", "qwen3_moe"})
# Activation functions of published models of these types. A model with one of them and no other undeclared key is
# checked without ``transformers``, whose import takes seconds.
USUAL_ACTIVATIONS = ("gelu_pytorch_tanh", "silu")
# Keys of configurations that have no effect in a run or would change its task, which is to predict each token from the
# earlier ones, without a cache and without an auxiliary loss.
FIXED_KEYS = frozenset(
    {
        "attn_logit_softcapping",
        "bos_token_id",
        "eos_token_id",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "use_bidirectional_attention",
        "use_cache",
    }
)


def key_problems(model_type: str, more: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the problems of ``more``, the keys that ``ModelParams`` does not declare, and the values of the others."""
    from transformers import CONFIG_MAPPING
    from transformers.activations import ACT2FN

    known = CONFIG_MAPPING[model_type].__annotations__.keys() - FIXED_KEYS
    found, passed = [], {}
    for key, value in sorted(more.items()):
        if key not in known:
            found.append(unknown_key(printable(f"model.{key}"), f"of {model_type}"))
        elif key == MODEL_TYPES[model_type] and value not in [*ACT2FN]:
            found.append(f"model.{key} is {value!r}; expected one of {', '.join(sorted(ACT2FN))}")
        elif key.endswith("dropout") and value:
            found.append(
                f"model.{key} is {value!r}: remove it; with dropout, two nodes get different losses from the same "
                "batches"
            )
        else:
            passed[key] = value
    return found, passed


def refused_values(
    model_type: str, more: Mapping[str, Any], configure: Callable[[Mapping[str, Any]], PreTrainedConfig]
) -> list[str]:
    """Return those of ``more``, or the model itself, with which ``transformers`` can't build the model.

    Args:
        configure: returns the configuration of the model with some of these values.
    """
    if not (reason := _build_error(model_type, more, configure)):
        return []
    alone = {}
    if not _build_error(model_type, {}, configure):
        alone = {key: _build_error(model_type, {key: value}, configure) for key, value in more.items()}
    return [f"model.{key} is {more[key]!r}: {text}" for key, text in alone.items() if text] or [f"model: {reason}"]


def _build_error(
    model_type: str, more: Mapping[str, Any], configure: Callable[[Mapping[str, Any]], PreTrainedConfig]
) -> str:
    """Return why ``transformers`` can't build the model, without its weights, with these values; "" if it can."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        config = configure(more)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - a wrong value raises an error of any type
        cause = error.__cause__ or error
        name = CONFIG_MAPPING[model_type].__name__
        return printable(f"expected as {name} of transformers describes it ({type(cause).__name__}: {cause})")
    return _routing_problem(config)


def _routing_problem(config: PreTrainedConfig) -> str:
    """Return why a mixture of experts can't route a token; "" if it can. ``transformers`` does not check it."""
    experts, chosen = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_tok", 0)
    if not experts or 1 <= chosen <= experts:
        return ""
    return f"num_experts_per_tok is {chosen}; expected from 1 to num_experts, {experts}"
