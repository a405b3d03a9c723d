"""Train a small model on seeded pages from a bucket, with ``R2DatasetLoader``.

    python examples/train_from_pages.py [--batches 60]

The bucket is on an S3 server with R2's rules in this process, and contains the dataset of a localnet.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

import tplr
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.localnet.dataset import SUBFOLDER, prepared_corpus, upload_dataset
from tplr.localnet.plan import PROFILE
from tplr.testing.s3server import serve
from tplr.training.loss import batch_loss
from tplr.training.model import build_model

SEQUENCE, BATCH, VOCABULARY = 64, 8, 512
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


async def train(corpus: Path, count: int) -> list[float]:
    """Train, and return the loss of each batch."""
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    hparams = tplr.load_hparams(PROFILE)
    hparams = hparams.model_copy(update={"model": hparams.model.model_copy(update=SIZES)})
    model = build_model(hparams)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pages = await tplr.R2DatasetLoader.next_pages(offset=0, n_pages=4, seed=1)
    losses: list[float] = []
    async with await tplr.R2DatasetLoader.create(BATCH, SEQUENCE, pages, tokenizer) as loader:
        async for batch in loader:
            loss = batch_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == count:
                break
    return losses


async def run(corpus: Path, count: int) -> None:
    account = new_account("dataset")
    with tempfile.TemporaryDirectory() as folder:
        async with serve(Path(folder) / "s3", key_table([account])) as server:
            await upload_dataset(corpus, account.writable, server.endpoint)
            os.environ.update(bucket_variables("dataset", account, "read"))
            os.environ.update(
                TPLR_S3_ENDPOINT=server.endpoint, TPLR_DATASET_SUBFOLDER=SUBFOLDER, TPLR_CACHE_FOLDER=f"{folder}/cache"
            )
            losses = await train(corpus, count)
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"{len(losses)} batches of {BATCH} x {SEQUENCE} tokens: loss {first:.3f} -> {last:.3f} nats per token")
    assert last < first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--cache", type=Path, default=Path(".cache/tplr/localnet"))
    args = parser.parse_args()
    asyncio.run(run(prepared_corpus(args.cache, None, VOCABULARY), args.batches))


if __name__ == "__main__":
    main()
