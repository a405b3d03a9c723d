"""The three runs have the sizes in their names, and updates of the sizes of their layouts."""

import pytest

from tplr.scale.sizes import run_constants, workload


def test_one_billion() -> None:
    load = workload("1B")
    assert load.parameters == pytest.approx(1.2e9, rel=0.01)
    assert load.update_bytes * 8 / load.parameters == pytest.approx(0.143, abs=0.002)


def test_constants_can_be_replaced_and_are_checked() -> None:
    assert run_constants("8B", commit_margin_seconds=5).commit_margin_seconds == 5
    with pytest.raises(ValueError, match="minimum_peers"):
        run_constants("8B", max_topk_peers=2)
