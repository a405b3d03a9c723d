"""The constants of a simulation, and the states and keys that follow from them."""

from pathlib import Path
from typing import Any

from bittensor_core import Keypair

from tplr.exchange.envelope import Run, Signer
from tplr.hparams import HParams
from tplr.localnet.plan import Scheme, scheme_constants
from tplr.node.train_state import TrainState
from tplr.training.model import build_model

WINDOW_SECONDS = 100.0
LONG_AGO = 1e6  # seconds since a window's end, so that gathering never waits
# Large enough that each page has specific tokens, which only training on that page teaches.
VOCABULARY = 1024
SINGLE_BYTES = 256
VALIDATOR = 0
START_WINDOW = 1


def profile(scheme: Scheme) -> HParams:
    """Return the constants of a localnet run with a scheme."""
    return HParams.model_validate(scheme_constants(scheme))


def small(hparams: HParams, *, vocabulary: int = VOCABULARY, **changes: Any) -> HParams:
    """Return the constants of a simulation: a small model that learns within 30 windows on one core."""
    model = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    run = {
        "model": hparams.model.model_copy(update=model),
        "sequence_length": 64,
        "batch_size": 8,
        "pages_per_window": 8,
        "validator_sample_rate": 1.0,
        "uids_per_window": 64,
        "minimum_peers": 1,
        "fingerprint_samples": 16,  # every member computes one in every window
        "peer_replacement_frequency": 2,
        "probation_windows": 0,
    }
    return hparams.model_copy(update={**run, **changes})


def new_signer(hparams: HParams, uid: int) -> Signer:
    """Return the signer of ``uid``; it has the same hotkey in every world."""
    return Signer.with_key(Run(0, hparams.version), uid, Keypair.create_from_uri(f"//{uid}"))


def new_train_state(hparams: HParams) -> TrainState:
    """Return a state with the run's initial weights, which is never saved."""
    train_state = TrainState(build_model(hparams), hparams, Path())
    train_state.start_window = START_WINDOW
    return train_state
