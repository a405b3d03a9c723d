"""Which processes of ``torchrun`` train together, and on which device each."""

import pytest

from tplr.cli import parse_arguments
from tplr.config import Environment
from tplr.node.arguments import node_arguments
from tplr.node.ranks import process_group, with_rank_device


@pytest.mark.parametrize(
    ("device", "local_rank", "own"),
    [("cuda", "3", "cuda:3"), ("cuda", None, "cuda"), ("cuda:1", "3", "cuda:1"), ("cpu", "3", "cpu")],
)
def test_each_process_of_a_machine_has_a_gpu_of_its_own(device, local_rank, own) -> None:
    environment = Environment({"LOCAL_RANK": local_rank} if local_rank else {})
    assert with_rank_device(node_arguments(parse_arguments(["miner", "--device", device])), environment).device == own


@pytest.mark.parametrize(("role", "size"), [("miner", None), ("miner", "1"), ("validator", "2")])
def test_a_single_process_and_other_roles_join_no_group(role, size) -> None:
    environment = Environment({"WORLD_SIZE": size} if size else {})
    with process_group(node_arguments(parse_arguments([role, "--device", "cpu"])), environment) as ranks:
        assert ranks is None
