"""Builds the columns of one shard of one domain: packs them, adds position ids, converts dtypes."""

from collections.abc import Mapping

import numpy as np

from tplr.errors import ConfigError
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.packing import plan
from tplr.stores.token_stream import Array
from tplr.stores.writer import Column


def shard_columns(documents: Mapping[str, Column], config: PipelineConfig) -> tuple[dict[str, Column], int]:
    """Return all keys of a shard, and the number of tokens that packing cut off.

    Raises:
        ConfigError: a number does not fit the dtype that the config gives its key.
    """
    columns, cut = dict(documents), 0
    if config.input.sections:
        settings, mode = config.preprocessing, config.output.position_ids_mode
        strategy = settings.packing_strategy
        layout = plan(documents["sequence"].offsets, strategy, settings.max_packed_len, settings.truncation_mode)
        columns, cut = {key: layout.apply(column) for key, column in documents.items()}, layout.cut
        if mode != "none":
            positions = layout.positions(mode, one_sequence=strategy == "simple")
            columns["position_ids"] = Column(positions, columns["sequence"].offsets)
    for key, dtype in config.output.dtype.items():
        columns[key] = Column(_as(columns[key].values, dtype, key), columns[key].offsets, columns[key].groups)
    return columns, cut


def _as(values: Array, dtype: str, key: str) -> Array:
    """Convert numbers to ``dtype``; floats may be rounded, nothing else may change."""
    kind = np.dtype(dtype).kind
    with np.errstate(invalid="ignore", over="ignore"):
        cast = values.astype(dtype)
    fits = np.isfinite(cast).all() if kind == "f" else np.array_equal(cast, values)
    if not fits:
        wrong = values[~np.isfinite(cast) if kind == "f" else cast != values][0]
        raise ConfigError(f"output.dtype: {key} holds {wrong}, which {dtype} can't represent: choose another dtype")
    return cast
