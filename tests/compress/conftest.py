"""A small run's shapes, with every odd kind among them, and random updates of it."""

import pytest
import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Coefficients

SHAPES = {
    "embed": (40, 32),
    "attention": (32, 32),
    "prime": (13, 31),
    "norm": (32,),
    "filters": (6, 4, 3),
    "scalar": (),
}


@pytest.fixture(params=[2, 0, 1, 4, 8], ids=lambda bits: f"{bits}bits")
def spec(request) -> PayloadSpec:
    return PayloadSpec.of(SHAPES, outer="demo", target_chunk=16, topk=6, bits=request.param)


@pytest.fixture
def coefficients(spec):
    def make(seed: int = 0) -> dict[str, Coefficients]:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, tensor in spec.tensors.items():
            order = torch.rand(tensor.grid.chunks, tensor.grid.entries, generator=generator)
            indices = order.argsort(dim=1)[:, : tensor.k].sort(dim=1).values
            made[name] = indices, torch.randn(tensor.grid.chunks, tensor.k, generator=generator)
        return made

    return make
