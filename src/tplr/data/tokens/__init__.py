"""Texts to token ids: as fast as equality with the tokenizer's own ids allows."""

from tplr.data.tokens.encoder import Encoder, encoder
from tplr.data.tokens.ragged import Ragged

__all__ = ["Encoder", "Ragged", "encoder"]
