"""Public interface of the data layer: names re-exported from ``tplr.streams`` and ``tplr.stores``."""

from importlib import import_module
from typing import Any

# Public name → the module that holds it, imported when the name is first asked for: ``import tplr.data`` is light.
_PLACES = {
    "BaseDataset": "tplr.stores.datasets",
    "CheckpointableDataset": "tplr.streams.dataset",
    "CheckpointableIterator": "tplr.streams.dataset",
    "DatasetFactory": "tplr.stores.datasets",
    "H5Store": "tplr.stores.h5",
    "JsonlStore": "tplr.stores.jsonl",
    "MmapStore": "tplr.stores.mmap",
    "Order": "tplr.streams.order",
    "ResumableDistributedSampler": "tplr.stores.sampler",
    "Sample": "tplr.streams.dataset",
    "StateDict": "tplr.streams.dataset",
    "StoreFactory": "tplr.stores.factory",
    "concat_datasets": "tplr.streams.dataset",
    "cu_seqlens": "tplr.streams.cu_seqlens",
    "detect_format": "tplr.stores.detect",
    "find_states": "tplr.streams.resume",
    "interleave_datasets": "tplr.streams.dataset",
    "load_state": "tplr.streams.state",
    "save_state": "tplr.streams.state",
}

__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
