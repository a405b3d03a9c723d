"""Sizes of a run, against the model and the payload."""

import pytest

from tplr.planner.workload import Workload
from tplr.training.model import build_model

TOY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(sparseloco, sized, tied):
    hparams = sized(sparseloco, **TOY, tie_word_embeddings=tied)
    load = Workload.of(hparams)
    assert load.tensors == {name: one.numel() for name, one in build_model(hparams).named_parameters()}
    head = TOY["vocab_size"] * TOY["hidden_size"]
    vectors = (2 * TOY["num_hidden_layers"] + 1) * TOY["hidden_size"]
    assert load.matmul_parameters == load.parameters - vectors - (0 if tied else head)


@pytest.mark.parametrize(
    ("given", "experts", "used"),
    [
        ({"num_experts": 16, "num_experts_per_tok": 4}, 16, 4),
        ({"num_experts": 16}, 16, 8),
        ({"num_experts_per_tok": 4}, 128, 4),
        ({}, 128, 8),
    ],
    ids=["given", "default used", "default number", "defaults"],
)
def test_a_token_is_multiplied_by_its_experts_only(sparseloco, sized, given, experts, used):
    """The defaults of ``transformers`` are 128 experts, of which a token uses 8."""
    moe = {"model_type": "qwen3_moe", "tie_word_embeddings": True, "moe_intermediate_size": 32}
    load = Workload.of(sized(sparseloco, **TOY, **moe, **given))
    one = 3 * TOY["num_hidden_layers"] * TOY["hidden_size"] * 32  # gate, up and down projection
    of_experts = sum(size for name, size in load.tensors.items() if ".experts." in name)
    assert of_experts == experts * one
    norms = TOY["num_hidden_layers"] * 2 * (TOY["hidden_size"] + 16) + TOY["hidden_size"]  # 16: of a head
    assert load.matmul_parameters == load.parameters - norms - of_experts + used * one


def test_flops_of_the_shipped_model(sparseloco):
    """By hand: 6 * 1.139e9 matrix parameters + 12 * 16 layers * 2048 * 2048 positions."""
    load = Workload.of(sparseloco)
    assert load.flops_per_token == pytest.approx(6.83e9 + 0.805e9, rel=1e-3)


def test_tokens_of_a_window(sparseloco, demo):
    assert Workload.of(sparseloco).tokens == 30 * 32 * 6 * 2048
    assert Workload.of(demo, tokens_per_page=50_000).tokens == 6 * 50_000 // (6 * 2048) * (6 * 2048)
    few = sparseloco.model_copy(update={"pages_per_window": 10})
    assert Workload.of(few, tokens_per_page=59_000).tokens == 10 * 59_000 // (6 * 2048) * (6 * 2048)


def test_owners_are_balanced(sparseloco):
    load = Workload.of(sparseloco)
    assert load.owned(1) == load.parameters
    for ranks in (2, 4, 8):
        assert load.parameters / ranks <= load.owned(ranks) <= load.parameters / ranks + load.largest
