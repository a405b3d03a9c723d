"""Batches arrive in order and unchanged, for every way of copying."""

import numpy as np
import pytest
import torch

from tplr.training.inputs import device_batches


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_batches_arrive_in_order(device, ahead):
    batches = np.random.default_rng(0).integers(0, 1000, (5, 2, 12))[:, :, ::-1]  # not contiguous
    arrived = list(device_batches(batches, torch.device(device), ahead=ahead))
    assert all(one.dtype == torch.int64 and one.device.type == device for one in arrived)
    assert np.array_equal(torch.stack(arrived).cpu().numpy(), batches)
    assert not list(device_batches(batches[:0], torch.device(device), ahead=ahead))
