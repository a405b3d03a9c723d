"""Measures the size of a window of fifteen peers: as their packed updates, and as the resulting step.

Each peer packs the gradient of a Llama of 150 million parameters on its own text (Python's sources, one token per word)
with ``hparams-demo.json`` (``demo``) or ``hparams-sparseloco.json``. A step of ``demo`` is a sign or zero for each
parameter; a step of ``sparseloco`` is a float32 number for each entry that any peer sent.

    python scripts/benchmarks/aggregate.py [--peers 15]

Prints bits per parameter, and writes ``docs/benchmarks/aggregate.csv``.
"""

import argparse
import csv
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from tplr.compress.payload import Update, decode_all, parse
from tplr.hparams import HParams
from tplr.training.model import build_model
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

ROOT = Path(__file__).parents[2]
PROFILES = ("hparams-demo.json", "hparams-sparseloco.json")
MODEL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12}
SHAPE = (1, 256)  # sequences and tokens of a peer's batch
SMALLEST = 19  # zstd's level


def read_tokens(vocab_size: int) -> np.ndarray:
    """Return the words and spaces of Python's own sources as int64 ids; rare words have the id 0."""
    text = "".join(path.read_text(errors="replace") for path in sorted(Path(os.__file__).parent.glob("*.py")))
    words = re.findall(r"\w+|[^\w\s]|\s+", text)
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(vocab_size - 1), 1)}
    return np.array([numbers.get(word, 0) for word in words])


def pack_all(profile: str, peers: int) -> tuple[dict[str, torch.Tensor], OuterScheme, list[Update]]:
    """Return the parameters, the scheme and each peer's update."""
    raw = json.loads((ROOT / profile).read_text())
    raw["model"] |= MODEL | {"num_key_value_heads": MODEL["num_attention_heads"]}
    hparams = HParams.model_validate({key: value for key, value in raw.items() if key != "_"})
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    tokens, rng = read_tokens(hparams.model.vocab_size), np.random.default_rng(0)
    updates = []
    for uid in range(peers):
        model.zero_grad()
        starts = rng.integers(0, len(tokens) - SHAPE[1], SHAPE[0])
        batch = torch.from_numpy(np.stack([tokens[start : start + SHAPE[1]] for start in starts]))
        model(input_ids=batch, labels=batch).loss.backward()
        gradient = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        scheme = outer_scheme(parameters, hparams)
        body = scheme.pack(gradient, step=0, window=0, uid=uid, pages_digest="0" * 64, batches=1)
        updates.append(parse(body, scheme.spec, window=0, uid=uid))
        print(f"{profile}: peer {uid + 1} of {peers}", flush=True)
    return {name: one.detach() for name, one in parameters.items()}, scheme, updates


def weigh_signs(parameters: dict[str, torch.Tensor], scheme: OuterScheme, updates: list[Update]) -> dict[str, float]:
    """Return the bits of a step's signs in several encodings, and the share of zeros."""
    before = {name: one.clone() for name, one in parameters.items()}
    scheme.apply(updates, step=0)
    signs = np.concatenate([(before[name] - one).sign().flatten().numpy() for name, one in parameters.items()])
    negative, zero = (
        8 * len(zstandard.compress(np.packbits(one).tobytes(), SMALLEST)) for one in (signs < 0, signs == 0)
    )
    return {
        "zeros, share": float((signs == 0).mean()),
        "signs, five in a byte": 8 * math.ceil(len(signs) / 5),
        "signs, a bit each, and zeros by zstd": len(signs) + zero,
        "signs and zeros by zstd": negative + zero,
    }


def weigh_union(scheme: OuterScheme, updates: list[Update]) -> dict[str, float]:
    """Return a lower bound in bits of the entries that any peer sent: their positions, and one float32 number each."""
    bits = sent = 0.0
    for tensor in scheme.spec.tensors.values():
        indices, _ = decode_all(updates, [tensor])
        for chunk in indices.transpose(0, 1).flatten(1):
            union = len(torch.unique(chunk))
            n = tensor.grid.entries
            places = math.lgamma(n + 1) - math.lgamma(union + 1) - math.lgamma(n - union + 1)
            bits += 32 * union + places / math.log(2)
            sent += union
    count = sum(tensor.grid.entries * tensor.grid.chunks for tensor in scheme.spec.tensors.values())
    return {"entries that anybody sent, share": sent / count, "those, at least": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=15)
    parser.add_argument("--profiles", nargs="+", default=PROFILES)
    args = parser.parse_args()
    peers = args.peers
    rows: list[dict[str, Any]] = []
    for profile in args.profiles:
        parameters, scheme, updates = pack_all(profile, peers)
        count = sum(one.numel() for one in parameters.values())
        weighed = {"updates end to end": 8.0 * sum(len(update.body) for update in updates)}
        is_demo = scheme.spec.outer == "demo"
        weighed |= weigh_signs(parameters, scheme, updates) if is_demo else weigh_union(scheme, updates)
        for form, value in weighed.items():
            rows.append(
                {"profile": profile, "peers": peers, "form": form, "value": value if "share" in form else value / count}
            )
            print(f"{profile:26} {form:34} {rows[-1]['value']:.4f}", flush=True)
    with (ROOT / "docs/benchmarks/aggregate.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
