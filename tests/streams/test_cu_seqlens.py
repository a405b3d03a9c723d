"""Packed training: each document has the same losses as alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tplr.data import CheckpointableDataset, cu_seqlens
from tplr.streams.testing import check_resume

LENGTHS = [5, 3, 0, 7, 1, 4, 11, 2]


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 64, (length,), generator=generator).tolist()} for length in LENGTHS]


def packs(length: int) -> CheckpointableDataset:
    return CheckpointableDataset.from_sequence(documents()).pack_chunk(length, document_ids=True)


def losses(model: torch.nn.Module, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """The loss of each token but the first, given those before it; ``(tokens - 1,)``."""
    logits = model(input_ids=ids[None], **inputs).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


def attention(offsets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A block-diagonal, causal mask from ``cu_seqlens`` alone; ``(1, 1, tokens, tokens)``."""
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        mask[begin:end, begin:end] = True
    return (mask & torch.ones_like(mask).tril())[None, None]


@torch.no_grad()
def test_a_model_has_the_same_losses_packed_as_unpacked() -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).double().eval()
    alone = [losses(model, torch.tensor(one["input_ids"])) for one in documents() if one["input_ids"]]
    together, leaky = [], []
    for pack in packs(12):
        ids, document = pack["input_ids"], pack["document_ids"]
        offsets, longest = cu_seqlens(document)
        assert longest == max(offsets.diff())
        inside = document[1:] == document[:-1]  # the first token of a document has no loss
        positions = pack["position_ids"][None]
        found = losses(model, ids, attention_mask=attention(offsets, ids), position_ids=positions)
        together += found[inside].tolist()
        leaky += losses(model, ids)[inside].tolist()
    expected = torch.cat(alone)
    torch.testing.assert_close(torch.tensor(together, dtype=torch.double), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(torch.tensor(leaky, dtype=torch.double), expected, rtol=1e-3)


def test_ids_and_positions_of_documents() -> None:
    found = [{name: column.tolist() for name, column in pack.items()} for pack in check_resume(packs(9))]
    assert [pack["document_ids"] for pack in found] == [
        [0] * 5 + [1] * 3,
        [0] * 7 + [1],
        [0] * 4,
        [0] * 9,
        [0] * 2,
    ]
    assert found[0]["position_ids"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert found[3]["position_ids"] == [*range(9)]
    assert all(column.dtype == torch.long for pack in packs(9) for column in pack.values())
    assert check_resume(packs(9).shuffle(2))


def test_batches_of_padded_packs() -> None:
    padding = {"input_ids": 0, "document_ids": -1, "position_ids": 0}
    (batch,) = packs(9).take(2).pad(padding, 9).batch(2)
    assert batch["document_ids"].tolist() == [[0] * 5 + [1] * 3 + [-1], [0] * 7 + [1] + [-1]]
    offsets, longest = cu_seqlens(batch["document_ids"])
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 5, 8, 9, 16, 17, 18]
    assert longest == 7


@pytest.mark.parametrize(
    ("ids", "offsets", "longest"),
    [([], [0], 0), ([3], [0, 1], 1), ([[0, 0], [0, 0]], [0, 2, 4], 2), ([[1, 0], [0, 1]], [0, 1, 2, 3, 4], 1)],
)
def test_offsets_end_at_rows_and_where_ids_change(ids, offsets, longest) -> None:
    found, length = cu_seqlens(torch.tensor(ids, dtype=torch.long))
    assert (found.tolist(), length) == (offsets, longest)


def test_a_column_of_that_name_is_refused() -> None:
    with pytest.raises(ValueError, match="document_ids=True adds the columns"):
        packs(9).pack_chunk(9, ("input_ids", "position_ids"), document_ids=True)
