"""Tensor shapes of a small run, including every unusual kind, and random updates of these shapes."""

import pytest
import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Coefficients
from tplr.compress.topk import select

SHAPES = {
    "embed": (40, 32),
    "attention": (32, 32),
    "prime": (13, 31),
    "norm": (32,),
    "filters": (6, 4, 3),
    "scalar": (),
}


@pytest.fixture(params=["2bits", "0bits", "1bits", "4bits", "8bits", "1bits-group"])
def spec(request) -> PayloadSpec:
    width, _, selection = request.param.partition("bits")
    rules = {"selection": "group"} if selection else {}
    return PayloadSpec.of(SHAPES, outer="demo", target_chunk=16, topk=6, bits=int(width), **rules)


@pytest.fixture
def coefficients(spec):
    def make(seed: int = 0) -> dict[str, Coefficients]:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, tensor in spec.tensors.items():
            order = torch.rand(tensor.grid.chunks, tensor.grid.entries, generator=generator)
            indices, _ = select(order, tensor.k, grouped=tensor.grouped)
            made[name] = indices, torch.randn(tensor.grid.chunks, tensor.k, generator=generator)
        return made

    return make
