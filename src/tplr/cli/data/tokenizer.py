"""Loads the tokenizer of ``--tokenizer``: from a folder, or from the hub, which must answer in time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load(name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer.

    Raises:
        ConfigError: not found.
        HubUnavailable: it is not on this machine, and the hub does not answer within a node's ``ANSWER_SECONDS``.
    """
    from tplr.errors import HubUnavailable
    from tplr.node.checks import ANSWER_SECONDS
    from tplr.tokenizer_files import pretrained_tokenizer

    if Path(name).exists():
        return pretrained_tokenizer(name, "--tokenizer")
    import_module("transformers").AutoTokenizer  # noqa: B018 - imports it, which does not count as time of the hub
    coming: Future[PreTrainedTokenizerFast] = Future()
    work = partial(_run, coming, name)
    threading.Thread(target=work, daemon=True).start()  # the process does not wait for it at exit
    try:
        return coming.result(ANSWER_SECONDS)
    except TimeoutError as error:
        raise HubUnavailable(
            f"--tokenizer {name!r}: not a local folder, and no answer from the hub within {ANSWER_SECONDS:g} s: "
            "check the network, or give the path of a tokenizer folder"
        ) from error


def _run(coming: Future[PreTrainedTokenizerFast], name: str) -> None:
    from tplr.tokenizer_files import pretrained_tokenizer

    try:
        coming.set_result(pretrained_tokenizer(name, "--tokenizer"))
    except BaseException as error:  # noqa: BLE001 - every error is passed to the caller
        coming.set_exception(error)
