"""Builds the model of a run, with the same first weights on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tplr.hparams import HParams

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def build_model(hparams: HParams, device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """A float32 Llama whose weights follow from ``hparams.init_seed``.

    Weights are drawn on the CPU for every ``device``: generators of different devices differ. The caller's random
    state does not change.
    """
    from transformers import LlamaForCausalLM  # takes seconds: only who builds a model waits for it

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hparams.init_seed)
        model = LlamaForCausalLM(hparams.model_config_for_transformers())
    # No dropout: two nodes must get the same losses from the same batches.
    torch.nn.Module.to(model, device, torch.float32)
    return model.eval()
