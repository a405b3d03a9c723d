"""Text and tokens: where they lie, which of them are meant, and how they become batches."""

from importlib import import_module
from typing import Any

# Public name → the module that holds it, imported when the name is first asked for: ``import tplr.data`` is light.
_PLACES = {
    "BaseDataset": "datasets",
    "CheckpointableDataset": "dataset",
    "CheckpointableIterator": "dataset",
    "DatasetFactory": "datasets",
    "H5Store": "store.h5",
    "JsonlStore": "store.jsonl",
    "MmapStore": "store.mmap",
    "Order": "order",
    "ResumableDistributedSampler": "sampler",
    "Sample": "dataset",
    "StateDict": "dataset",
    "StoreFactory": "store.factory",
    "concat_datasets": "dataset",
    "detect_format": "store.detect",
    "interleave_datasets": "dataset",
    "load_state": "state",
    "save_state": "state",
}

__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
