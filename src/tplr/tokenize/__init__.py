"""Tokenizes texts to exactly the ids of a Hugging Face tokenizer, several times as fast. No I/O.

    from tplr.tokenize import encoder

    rows = encoder(tokenizer).encode_batch(texts, max_length=2048)   # Ragged: ids int32, offsets int64

``encoder(tokenizer)`` chooses the implementation:

- byte-level BPE with GPT-2's pattern: ``fast.TableBPE``, pre-tokens by array operations and ids from a hash table;
- byte-level BPE with the patterns of cl100k, Llama 3, Qwen 2 and o200k: ``fast.TiktokenBPE``, tiktoken text by text;
- any other tokenizer of the ``tokenizers`` library: ``hf_batch.HFBatchEncoder``, the library's batches;
- any other tokenizer of ``transformers``: ``hf_batch.HFCallEncoder``, calls of the tokenizer;
- any other callable: ``hf_batch.CallableEncoder``, a call for each text.

An implementation is used only if the tokenizer's definition says that its ids are equal, and if they are equal for
probe texts. The fast ones are also compared with the library while they run. ``docs/tokenize.md`` has the details.
"""

from tplr.tokenize.encoder import Encoder, encoder
from tplr.tokenize.ragged import Ragged

__all__ = ["Encoder", "Ragged", "encoder"]
