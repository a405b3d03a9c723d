"""Writes and loads a model's folder in the format of ``transformers``: configuration, tokenizer and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tplr.errors import ConfigError, StateError
from tplr.exchange.snapshot import COPY_BYTES, TensorLayout
from tplr.files import atomic_write
from tplr.hparams import HParams
from tplr.run.weights import MAX_SHARD_BYTES, ExportDtype, write_weights
from tplr.tokenizer_files import read_tokenizer
from tplr.training.model import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
HPARAMS = "hparams.json"
# A tokenizer class that ``transformers`` 4 can also load; version 5 writes a class name of its own.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


class LoadedModel(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


def write_model(
    folder: Path,
    *,
    hparams: HParams,
    hparams_text: bytes,
    tokenizer: PreTrainedTokenizerFast,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, TensorLayout],
    dtype: ExportDtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model's folder, with one tensor at a time in memory. Blocks.

    Args:
        hparams_text: content of the ``hparams`` file, which is copied.
        tensors, layouts, dtype: as ``write_weights``.

    Raises:
        StateError: the disk is full, or a tensor can't be read.
    """
    write_settings(folder, hparams=hparams, hparams_text=hparams_text, tokenizer=tokenizer, dtype=dtype)
    write_weights(folder, tensors, layouts, dtype, max_bytes=max_shard_bytes)


def write_settings(
    folder: Path, *, hparams: HParams, hparams_text: bytes, tokenizer: PreTrainedTokenizerFast, dtype: ExportDtype
) -> None:
    """Write all files of a model's folder except the weights. Blocks. Arguments and errors as ``write_model``."""
    _write_json(folder / CONFIG, _configuration(hparams, tokenizer, dtype))
    _write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **_special_tokens(tokenizer)})
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / TOKENIZER_CONFIG).read_text())
    _write_json(folder / TOKENIZER_CONFIG, settings | {"tokenizer_class": TOKENIZER_CLASS})
    atomic_write(folder / HPARAMS, hparams_text)


def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Load the model of a folder written by ``write_model``. Blocks.

    Args:
        dtype: type of the weights; default: that of the files.

    Raises:
        ConfigError: the folder holds no model.
        StateError: a file is missing or damaged, or belongs to another model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG}, so it has no exported model: give a folder of tplr export")
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,  # the folder is untrusted, so no pickle
            output_loading_info=True,
        )
        model, found = loaded
        tokenizer = read_tokenizer(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise StateError(f"{folder}: the model can't be loaded: {str(error).splitlines()[0][:300]}") from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if wrong := sorted({str(one) for kind in kinds for one in found[kind]}):
        raise StateError(f"{folder}: {len(wrong)} tensors are missing, unknown or of another shape: {wrong[:3]}")
    return LoadedModel(model.to(device).eval(), tokenizer)


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by relative path. Blocks."""
    return {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def model_layouts(hparams: HParams) -> dict[str, TensorLayout]:
    """Return the layouts of the tensors of a run's model, by name; tied tensors have one name."""
    return {name: TensorLayout.of(one) for name, one in meta_model(hparams).named_parameters()}


def _configuration(hparams: HParams, tokenizer: PreTrainedTokenizerFast, dtype: ExportDtype) -> dict[str, Any]:
    model = meta_model(hparams)
    config = json.loads(model.config.to_json_string(use_diff=True))
    # A run computes without a cache; generation needs one.
    return config | {
        "architectures": [type(model).__name__],
        "dtype": dtype,
        "use_cache": True,
        **_special_tokens(tokenizer),
    }


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return the tokenizer's special token ids, because a configuration's defaults belong to another tokenizer."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(COPY_BYTES):
            found.update(data)
    return found.hexdigest()
