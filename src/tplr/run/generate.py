"""``tplr generate``: continues a prompt, and writes each token as it is sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tplr.errors import ConfigError

if TYPE_CHECKING:
    from tplr.run.folder import LoadedModel

Write = Callable[[str], object]


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token.

    Attributes:
        tokens: maximum number of tokens; fewer if the model ends the text or its positions end.
        temperature: 0: always the most probable token.
        top_p: sample among the most probable tokens that have this probability together.
        seed: the same seed gives the same text on the same kind of device.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


def generate(loaded: LoadedModel, prompt: str, sampling: Sampling, write: Write = sys.stdout.write) -> str:
    """Write the prompt and its continuation piece by piece. Blocks.

    Args:
        write: called with each piece of text.

    Returns:
        The whole text.

    Raises:
        ConfigError: the prompt is empty, or leaves no position for another token.
    """
    from transformers import TextStreamer

    model, tokenizer = loaded
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    positions, given = int(model.config.max_position_embeddings), ids.shape[1]
    if not 0 < given < positions:
        raise ConfigError(
            f"the prompt has {given} tokens, the model has {positions} positions: expected 1 to {positions - 1}"
        )
    pieces: list[str] = []

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            write(text)

    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        causal: Any = model  # the type checker does not know that every model can generate
        causal.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(sampling.tokens, positions - given),
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_p=sampling.top_p if sampling.temperature else None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            use_cache=True,
            streamer=Pieces(tokenizer, skip_special_tokens=True),
        )
    return "".join(pieces)
