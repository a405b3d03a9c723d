"""Nested states survive a round trip; any other input is refused with one error."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch

from tplr.errors import StateError
from tplr.exchange.nested_state import join_state, split_state

STATE = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}, 7: {"momentum_buffer": None}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "maximize": False, "params": [0, 7]}],
    "milestones": Counter({30: 1, 80: 2}),
    "best": math.inf,
    "worst": -math.inf,
    "1": "text",
    1: 5,
    "nested": ((), [[]], {}),
}


def round_trip(state: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    form = json.loads(json.dumps(split_state(state, "optimizer", tensors), allow_nan=False))
    return join_state(form, tensors)


def test_round_trip() -> None:
    found = round_trip(STATE)
    tensors = [found["state"][0].pop(name) for name in ("step", "exp_avg")]
    assert [one.tolist() for one in tensors] == [3.0, [0.0, 1.0, 2.0, 3.0]]
    assert found == {**STATE, "state": {0: {}, 7: {"momentum_buffer": None}}}
    assert type(found["milestones"]) is Counter
    assert type(found["param_groups"][0]["betas"]) is tuple
    assert math.isnan(round_trip(math.nan))


def test_tensors_are_named_by_their_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    split_state(STATE, "optimizer", tensors)
    assert tensors.keys() == {"optimizer.state.0.step", "optimizer.state.0.exp_avg"}


@pytest.mark.parametrize(
    "keys", [[1, "1"], ["1", 1, "1~"], ["1~", 1, "1"]], ids=["number and text", "later suffix", "earlier suffix"]
)
def test_tensors_whose_keys_read_alike_are_all_kept(keys: list[Any]) -> None:
    found = round_trip({key: torch.tensor(i) for i, key in enumerate(keys)})
    assert {key: one.item() for key, one in found.items()} == {key: i for i, key in enumerate(keys)}
    nested = round_trip({"w": {"x": torch.tensor(0)}, "w.x": torch.tensor(1)})
    assert (nested["w"]["x"].item(), nested["w.x"].item()) == (0, 1)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {"a": [lambda: 0]}, {(1, 2): 3}, {None: 1}])
def test_objects_of_other_kinds_are_named(value: Any) -> None:
    with pytest.raises(StateError, match=r"^optimizer"):
        split_state(value, "optimizer", {})


@pytest.mark.parametrize(
    "form",
    [
        {"tensor": "absent"},
        {"tensor": 3},
        {"float": "x"},
        {"other": 1},
        {},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"dict": 3},
        {"tuple": 3},
        {"counter": [3]},
        [{"tuple": [{"unknown": 0}]}],
    ],
)
def test_forms_that_nobody_wrote_are_refused(form: Any) -> None:
    with pytest.raises(StateError, match="malformed state"):
        join_state(form, {})
