"""The column "must agree" of ``docs/hparams.md`` for the update scheme: what changes the model that receivers get.

One miner sends updates under the run's constants. A receiver with another value of one key gets the same model from
them if the key is ``local``; if it is for ``all``, it gets another one, or refuses the updates.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tplr.compress.payload import parse
from tplr.errors import PayloadError
from tplr.hparams import HParams
from tplr.training.fingerprint import digest
from tplr.training.schemes import outer_scheme

GUIDE = (Path(__file__).parents[3] / "docs" / "hparams.md").read_text()
SECTION = GUIDE.partition("## Update scheme")[2].partition("\n## ")[0]
AGREE = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (all|validators|local) \|$", SECTION, re.M))
GROUPS = {"outer", "demo", "sparseloco"}  # the other scheme, or no value of its own
UNTRIED = {"outer_delay"}  # when a miner applies a window, not how
OTHER = {
    "topk_compression": 4,
    "topk_selection": "group",
    "target_chunk": 4,
    "quantization_bits": 4,
    "quantization_scale": "tensor",
    "quantization_codebook": "bins",
    "quantization_rounding": "stochastic",
    "stale_after_windows": 3,
    "demo.learning_rate": {"peak": 5e-3},
    "demo.momentum_decay": 0.5,
    "demo.weight_decay": 0.1,
    "sparseloco.inner_optimizer": {"inner_optimizer": "adamw", "muon_momentum": None},
    "sparseloco.muon_momentum": 0.5,
    "sparseloco.inner_steps": 2,
    "sparseloco.batches_per_inner_step": 1,
    "sparseloco.inner_learning_rate": {"peak": 5e-4},
    "sparseloco.adam_beta1": 0.8,
    "sparseloco.adam_beta2": 0.9,
    "sparseloco.adam_epsilon": 1e-6,
    "sparseloco.weight_decay": 0.0,
    "sparseloco.gradient_clip_norm": 0.5,
    "sparseloco.error_feedback_decay": 0.5,
    "sparseloco.outer_learning_rate": 0.25,
    "sparseloco.outer_learning_rate_points": ({"step": 2, "rate": 0.25},),
    "sparseloco.outer_momentum": 0.9,
    "sparseloco.outer_nesterov": True,
    "sparseloco.expected_share": 0.5,
}
# A value at which the key has an effect: Nesterov's form needs a momentum, the rest of a norm cap updates above it.
MUON = {"inner_optimizer": "muon", "muon_momentum": 0.95}
RUN = {"demo": {}, "sparseloco": {"outer_momentum": 0.5, "peak": 1e-3} | MUON}


@pytest.fixture(scope="module")
def named(tensors: Callable) -> Callable:
    """Return a function that makes tensors with names like those of a decoder layer's matrices."""
    return lambda seed: {f"model.layers.0.{name}": one for name, one in tensors(seed).items()}


@pytest.fixture(scope="module")
def runs(hparams: Callable, named: Callable) -> dict[str, tuple[list[bytes], str]]:
    """What a miner sends in three windows, and the digest of a receiver with its constants, by scheme."""
    found = {}
    for scheme, constants in RUN.items():
        bodies = sent(hparams(scheme, **constants), named)
        found[scheme] = bodies, received(bodies, hparams(scheme, **constants), named)
    return found


def sent(sender: HParams, tensors: Callable) -> list[bytes]:
    """Return a miner's updates of three windows."""
    miner, made = outer_scheme(tensors(0), sender), {"uid": 1, "pages_digest": "00" * 32, "batches": 1}
    return [miner.pack(tensors(1 + step), step=step, window=9 + step, **made) for step in range(3)]


def received(bodies: list[bytes], receiver: HParams, tensors: Callable) -> str:
    """Return the digest of the receiver's model after these windows; empty if it refuses an update."""
    parameters = tensors(0)
    node = outer_scheme(parameters, receiver)
    for step, body in enumerate(bodies):
        try:
            update = parse(body, node.spec, window=9 + step, uid=1)
        except PayloadError:
            return ""
        node.apply([update], step=step)
    return digest(parameters)


def test_every_row_is_tried() -> None:
    assert OTHER.keys() == AGREE.keys() - GROUPS - UNTRIED


@pytest.mark.parametrize("key", sorted(OTHER))
def test_a_receiver_with_another_value(
    key: str, hparams: Callable, named: Callable, runs: dict[str, tuple[list[bytes], str]]
) -> None:
    group, _, name = key.rpartition(".")
    value = OTHER[key]
    change = value if isinstance(value, dict) else {name: value}
    for scheme in [group] if group else ["demo", "sparseloco"]:
        bodies, expected = runs[scheme]
        same = received(bodies, hparams(scheme, **(RUN[scheme] | change)), named) == expected
        assert same == (AGREE[key] != "all"), f"{scheme}: the model is {'the same' if same else 'another'}"
