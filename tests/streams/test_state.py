import copy
import json

import numpy as np
import pytest
import torch

from tplr.errors import StateError
from tplr.streams.state import load_state, save_state, seal, unseal

LINES = ["from_sequence[3]", "shuffle(4, 42)"]
SAMPLES = {
    "plain": [None, True, 1, 2**70, -1.5, "text", [], {}],
    "tokens": list(range(-5, 40)),
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3])),
    "keys": {1: "a", "$array": "b", (1, 2): "c"},
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "scalar": np.float32(0.5),
    "tensor": torch.arange(4),
    "tensor of bits": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "flag": torch.tensor(True),
}


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


def test_what_is_sealed_comes_back_through_json_and_files_any_number_of_times(tmp_path):
    state = seal(SAMPLES, LINES)
    assert json.loads(json.dumps({**state, "arrays": None})) == {**state, "arrays": None}
    assert len(state["arrays"]) <= 7  # one for each dtype, not for each sample
    save_state(tmp_path / "state", state)
    before = copy.deepcopy(state)
    for _ in range(2):
        assert same(unseal(state, LINES).position, SAMPLES)
        assert same(unseal(load_state(tmp_path / "state"), LINES).position, SAMPLES)
    assert same(before, state)


def test_a_state_does_not_change_with_what_it_was_made_of():
    array = np.arange(3)
    state = seal({"a": array}, LINES)
    array[:] = 9
    position = unseal(state, LINES).position
    assert position["a"].tolist() == [0, 1, 2]
    position["a"][:] = 7
    assert unseal(state, LINES).position["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, "version 1"),
        ({"format": "other"}, "not a state"),
        ({"more": 1}, "not a state"),
        (
            {"pipeline": ["from_sequence[4]", LINES[1]]},
            r"1 was from_sequence\[4\], here it is from_sequence\[3\]",
        ),
        ({"pipeline": LINES[:1]}, "lacks the further transforms shuffle"),
        ({"pipeline": [*LINES, "take(3)"]}, r"has the further transforms take\(3\)"),
        ({"fingerprint": "0"}, "damaged"),
        ({"position": {"$array": ["int64", 0, [9]]}}, "damaged"),
        ({"position": {"$what": 1}}, "damaged"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(change, says):
    with pytest.raises(StateError, match=says):
        unseal({**seal({"a": np.arange(3)}, LINES), **change}, LINES)
    with pytest.raises(StateError, match="not a state"):
        unseal({"index": 3}, LINES)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StateError, match=r"position.buffer\[1\].fn holds object"):
        seal({"buffer": [{}, {"fn": object()}]}, LINES)
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(StateError, match="holds no state"):
        load_state(tmp_path / "file")
