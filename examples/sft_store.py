"""Prepare a store of conversations for supervised fine-tuning, and train a small model on the answers.

python examples/sft_store.py [--steps 40]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tplr.data import DatasetFactory, ResumableDistributedSampler
from tplr.localnet.dataset import prepared_corpus
from tplr.stores.preprocess import PipelineConfig, prepare

VOCABULARY, WINDOW, BATCH = 512, 64, 4
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
)
CONFIG = {
    "input": {"sections": [{"field": "messages", "template": True, "action": "$role"}]},
    "mask": {"assistant": "train"},
    "preprocessing": {"min_chars": 0, "max_seq_len": 256, "packing_strategy": "bfd", "max_packed_len": 256},
}


def write_conversations(path: Path) -> None:
    """Write questions and answers; a real data set has files like this one."""
    chats = [
        [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
        ]
        for a in range(20)
        for b in range(20)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def train(store: Path, steps: int) -> list[float]:
    """Train, and return the loss on the answers in each batch; questions are input, but not trained on."""
    dataset = DatasetFactory.load("sft", store, window_size=WINDOW)
    sampler = ResumableDistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=dataset.collate)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=512, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
            answers = batch["loss_mask"]
            loss = cross_entropy(logits[answers], batch["target_ids"][answers])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cache", type=Path, default=Path(".cache/tplr/localnet"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(prepared_corpus(args.cache, None, VOCABULARY) / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder / "tokenizer")
        write_conversations(folder / "chats.jsonl")
        config = PipelineConfig.from_dict(CONFIG)
        prepared = prepare([folder / "chats.jsonl"], folder / "store", config, folder / "tokenizer")
        (store,) = [path for path in (folder / "store").iterdir() if path.is_dir()]
        losses = train(store, args.steps)
    print(f"{prepared.counts.used} conversations prepared; loss on the answers {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
