"""Texts to token ids: as fast as equality with the tokenizer's own ids allows."""

from tplr.tokenize.encoder import Encoder, encoder
from tplr.tokenize.ragged import Ragged

__all__ = ["Encoder", "Ragged", "encoder"]
