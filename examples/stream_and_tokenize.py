"""Stream a dataset, tokenize it on the fly, stop in the middle, and resume at exactly the same batch.

    python examples/stream_and_tokenize.py [--batches 40]

The texts are the same as in a localnet: Python's standard library as parquet files, with a tokenizer trained on them.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tplr.data import CheckpointableDataset, load_state, save_state
from tplr.localnet.dataset import prepared_corpus

SEQUENCE, BATCH, VOCABULARY = 128, 8, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--cache", type=Path, default=Path(".cache/tplr/localnet"))
    args = parser.parse_args()
    corpus = prepared_corpus(args.cache, None, VOCABULARY)
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    dataset = (
        CheckpointableDataset.from_files(f"{corpus}/dataset/**/*.parquet", shuffle_shards=True)
        .tokenize(tokenizer)
        .ensure_bos_eos(tokenizer)
        .concat_chunk(SEQUENCE)
        .batch(BATCH)
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, dataset.iter() as batches:
        for _ in range(args.batches):
            next(batches)
        speed = args.batches * BATCH * SEQUENCE / (time.monotonic() - began)
        save_state(Path(folder) / "position", batches.state_dict())
        expected = next(batches)["input_ids"]
        state = load_state(Path(folder) / "position")
    with dataset.iter(state_dict=state) as batches:
        assert torch.equal(next(batches)["input_ids"], expected)
    print(f"{args.batches} batches of {BATCH} x {SEQUENCE} tokens, {speed:,.0f} tokens a second")
    print("resumed at the same batch, which begins:", tokenizer.decode(expected[0, :16]).strip()[:60])


if __name__ == "__main__":
    main()
