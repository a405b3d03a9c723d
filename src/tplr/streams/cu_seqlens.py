"""cu_seqlens: offsets of the documents in packs, in the format of variable-length attention kernels."""

import torch


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the offsets of the documents in a pack, or in a batch's concatenated packs, and the longest length.

    Args:
        document_ids: integers of shape ``(tokens,)`` or ``(batch, tokens)``, as ``pack_chunk`` returns them. Neighbours
            with equal ids are one document; no document continues in the next row. Padding with a separate id, such as
            -1, is a document.

    Returns:
        cumulative lengths, int32 of shape ``(documents + 1,)``, from 0 to the number of all tokens, on the device of
        ``document_ids``; and the tokens of the longest document. These are ``cu_seqlens`` and ``max_seqlen`` of
        FlashAttention, and ``cu_seq_lens_q``/``_k`` and ``max_length_q``/``_k`` of transformers.
    """
    rows = torch.atleast_2d(document_ids)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    offsets = begins.flatten().nonzero().flatten()
    ends = torch.cat([offsets, offsets.new_tensor([rows.numel()])])
    longest = int(ends.diff().max()) if rows.numel() else 0
    return ends.to(torch.int32), longest
