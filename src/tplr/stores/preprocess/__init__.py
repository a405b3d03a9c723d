"""Prepares token stores from raw records: selects fields, masks, packs, and cuts shards."""

from importlib import import_module
from typing import Any

# Imported on first access, because each imports heavy modules.
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
