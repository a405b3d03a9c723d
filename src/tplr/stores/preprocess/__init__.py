"""Raw records to stores of token ids: which fields, how they are masked, packed, cut into shards."""

from importlib import import_module
from typing import Any

# Imported when they are first asked for: each pulls in what only its users need.
_PLACES = {
    "PipelineConfig": "tplr.stores.preprocess.config",
    "prepare": "tplr.stores.preprocess.pipeline",
    "Prepared": "tplr.stores.preprocess.pipeline",
}

__all__ = ["PipelineConfig", "Prepared", "prepare"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
