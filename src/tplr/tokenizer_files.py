"""Loads tokenizers of ``transformers``, and refuses those whose files are damaged or incomplete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.errors import ConfigError, HubUnavailable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def pretrained_tokenizer(name: str, setting: str, folder: Path | None = None) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a local path (relative to ``folder``) or by its hub name; ``setting`` holds the name.

    Raises:
        ConfigError: not found.
        HubUnavailable: it is not on this machine, and the hub can't be reached.
    """
    local = (folder or Path()) / name
    found = local.exists()
    try:
        return read_tokenizer(local if found else name)
    except (OSError, ValueError) as error:
        told = str(error).splitlines()[0]
        if found:
            raise ConfigError(f"{setting} {name!r}: its folder has no tokenizer that can be loaded: {told}") from error
        kind = HubUnavailable if "couldn't connect" in str(error) else ConfigError
        raise kind(
            f"{setting} {name!r}: neither a local folder nor available from the hub ({told}); download it once, or "
            "give the path of a tokenizer folder"
        ) from error


def read_tokenizer(name: Path | str, *, local_files_only: bool = False) -> Any:
    """Load any tokenizer of ``transformers`` from a folder or by its hub name.

    Raises:
        OSError: not found, or the hub can't be reached.
        ValueError: its files are damaged or incomplete.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(name), use_fast=True, local_files_only=local_files_only)
    except OSError:
        raise
    except Exception as error:  # ValueError; KeyError and others; Exception itself of the tokenizers library
        told = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"expected tokenizer.json and tokenizer_config.json, whole ({type(error).__name__}: {told})"
        ) from error
    # Without its vocabulary, transformers makes a tokenizer of the class's special tokens, and of T5's one for spaces.
    if len(tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)) < 2:
        raise ValueError("it has only special tokens: the file of its vocabulary, such as tokenizer.json, is missing")
    return tokenizer
