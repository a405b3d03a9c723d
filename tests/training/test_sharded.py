"""A training state over 1, 2 and 4 ranks on the CPU: the same bytes, and each rank holds its share."""

from typing import Any

import numpy as np
import pytest
from rank_processes import run_ranks

from tplr.training.parallel import rank_rows

pytestmark = pytest.mark.timeout(900)  # real processes
# Vocabulary and widths that neither 2 nor 4 divides; the last of four ranks has no row of some tensors.
ODD = {"vocab_size": 67, "intermediate_size": 30, "hidden_size": 16, "num_hidden_layers": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "demo": {"weight_decay": 0.01},
    "sparseloco": {
        "inner_steps": 2,
        "batches_per_inner_step": 3,
        "outer_momentum": 0.5,
        "outer_nesterov": True,
        "expected_share": 0.25,
    },
}
SETTINGS["muon"] = SETTINGS["sparseloco"] | {"inner_optimizer": "muon", "muon_momentum": 0.95}


@pytest.fixture
def written(tiny, tmp_path):
    """Writes hparams of a scheme; returns the file."""

    def write(scheme: str, model=ODD, **changes):
        hparams = tiny("sparseloco" if scheme == "muon" else scheme, **SETTINGS[scheme] | changes)
        hparams = hparams.model_copy(update={"model": hparams.model.model_copy(update=model)})
        path = tmp_path / f"{scheme}.json"
        path.write_text(hparams.model_dump_json())
        return str(path)

    return write


def ended_well(ended, size):
    assert ended.codes == [0] * size, "\n".join(ended.logs)
    return ended.results[0]


@pytest.mark.parametrize(
    ("scheme", "sizes", "windows"),
    [
        pytest.param("demo", (2,), 3, marks=pytest.mark.long),
        ("muon", (2,), 3),  # sparseloco's scheme, with the inner optimizer of production
        pytest.param("muon", (2, 4), 3, marks=pytest.mark.long),
        pytest.param("sparseloco", (2, 4), 20, marks=pytest.mark.long),
    ],
)
def test_a_life_over_several_ranks_has_the_bytes_of_one_process(scheme, sizes, windows, written, tmp_path):
    """First weights, updates, applied windows, fingerprints and digests are equal; training and losses are equal up to
    rounding."""
    hparams, found = written(scheme), {}
    for size in (1, *sizes):
        place = tmp_path / str(size)
        ended = run_ranks(size, place, "life", hparams=hparams, folder=str(place / "state"), windows=windows)
        found[size] = ended_well(ended, size)
    alone = found[1]
    assert len({digest for digest, *_ in alone["digests"]}) == windows
    assert alone["digests"][-1][3] == windows
    # Norm caps and outer momentum change in every window; DeMo's scheme has neither.
    assert len({outer for _, _, outer, _ in alone["digests"]}) == (1 if scheme == "demo" else windows)
    for size in sizes:
        ranks = found[size]
        for what in ("first", "digests", "bodies", "saved", "spoilt"):
            assert ranks[what] == alone[what], (size, what)
        assert "lm_head.weight" in ranks["spoilt"]
        np.testing.assert_allclose(ranks["held_out"], alone["held_out"], atol=1e-6)
        for one, other in zip(ranks["losses"], alone["losses"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)  # of five losses added up, or of single ones
        for one, other in zip(ranks["work"], alone["work"], strict=True):
            # Sums in another order: float32's rounding, through AdamW's quotient of two small numbers.
            assert np.linalg.norm(np.subtract(one, other)) < 1e-4 * np.linalg.norm(other)

    # Saved on four ranks (or two), read on two, saved again, read on one: all of it, and a checkpoint the same.
    folder, last, saved = str(tmp_path / str(max(sizes)) / "state"), alone["digests"][-1][0], found[max(sizes)]
    for size in (2, 1):
        back = ended_well(run_ranks(size, tmp_path / f"back-{size}", "restored", hparams=hparams, folder=folder), size)
        # A restore is exact, also of moments, whose training differs by rounding.
        assert (back["digest"], back["own"], back["step"]) == (last, saved["own"], windows), size
    same = str(tmp_path / "1" / "state")
    expected = ended_well(run_ranks(1, tmp_path / "same", "restored", hparams=hparams, folder=same), 1)
    assert expected["own"] == alone["own"]
    if scheme == "demo":  # error feedback has the same bytes on every number of ranks; moments are trained
        assert saved["own"] == alone["own"]


def test_a_window_interrupts_a_training_on_several_ranks_as_in_one_process(written, tmp_path):
    hparams, found = written("sparseloco", outer_delay=1), {}
    for size in (1, 2):
        place = tmp_path / str(size)
        found[size] = ended_well(run_ranks(size, place, "overlapped", hparams=hparams, folder=str(place)), size)
    assert found[2]["applied"] == found[1]["applied"]
    apart = np.linalg.norm(np.subtract(found[2]["work"], found[1]["work"]))
    assert apart < 1e-4 * np.linalg.norm(found[1]["work"])


@pytest.mark.parametrize("scheme", [pytest.param("demo", marks=pytest.mark.long), "sparseloco"])
def test_inner_products_of_several_ranks_are_those_of_one_but_for_rounding(scheme, written, tmp_path):
    hparams, found = written(scheme), {}
    for size in (1, 2, 4):
        place = tmp_path / str(size)
        found[size] = ended_well(run_ranks(size, place, "aligned", hparams=hparams, folder=str(place)), size)
    alone = found[1]
    assert np.abs(alone["products"]).min() > 1e-6
    for size in (2, 4):
        assert found[size]["uids"] == alone["uids"] == [0, 1, 2]
        for what in ("gram", "norms"):  # these contain no gradient
            np.testing.assert_allclose(found[size][what], alone[what], rtol=1e-12)
        for what in ("losses", "products", "own", "unit"):
            np.testing.assert_allclose(found[size][what], alone[what], atol=1e-5)


def test_an_alignment_ends_with_the_node_after_its_gradient(written, tmp_path):
    ended = run_ranks(2, tmp_path, "align_ended", hparams=written("sparseloco"), folder=str(tmp_path))
    assert "about to end" in ended_well(ended, 2)["error"]
    assert [one["tensors"] for one in ended.results] == [0, 0]  # no rank works on for a result that is dropped


def test_all_ranks_refuse_a_state_of_which_one_can_not_read_its_part(written, tmp_path):
    ended = run_ranks(2, tmp_path, "unreadable", hparams=written("sparseloco"), folder=str(tmp_path / "state"))
    own, shared = ended_well(ended, 2)["refused"]
    assert "shard-00001-" in own
    assert "shard-00001-" in shared


def test_tensors_of_few_rows_go_to_each_rank_and_come_back(tmp_path):
    for size in (2, 4):
        ended = run_ranks(size, tmp_path / str(size), "uneven", rows=[1, 2, 3, 5, 8])
        assert ended_well(ended, size) == {"sum": 0.25 * size}


def test_rows_of_ranks_follow_each_other():
    for rows in range(12):
        for size in (1, 2, 4, 5):
            slices = [rank_rows(rows, rank, size) for rank in range(size)]
            assert [i for one in slices for i in range(rows)[one]] == list(range(rows))


@pytest.mark.long
def test_each_rank_keeps_its_share_and_at_most_the_largest_tensor_more(written, tmp_path):
    """Weights, moments, error feedback and outer momentum."""
    size = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    hparams, found = written("sparseloco", size), {}
    for ranks in (1, 2, 4):
        place = tmp_path / str(ranks)
        found[ranks] = ended_well(run_ranks(ranks, place, "persistent", hparams=hparams, folder=str(place)), ranks)
    (whole,), largest = found[1]["bytes"], max(found[1]["sizes"])
    assert whole > 5 * sum(found[1]["sizes"])
    for ranks in (2, 4):
        assert max(found[ranks]["bytes"]) <= 1.1 * (whole / ranks + largest)
        assert min(found[ranks]["bytes"]) >= 0.9 * whole / ranks - largest


def test_layers_gathered_in_bfloat16_give_the_work_of_float32_but_for_the_norms(written, tmp_path):
    """Matrix products round their weights to bfloat16 anyway. The first weights of norms are 1 in both."""
    hparams, found = written("demo", precision="bfloat16"), {}
    for bfloat16 in (False, True):
        place = tmp_path / str(bfloat16)
        settings = {"gather_bfloat16": bfloat16}
        found[bfloat16] = ended_well(
            run_ranks(2, place, "worked", hparams=hparams, folder=str(place), settings=settings), 2
        )
    plain, half = found[False], found[True]
    for name, work in plain["work"].items():
        if "norm" in name:
            np.testing.assert_allclose(half["work"][name], work, rtol=2**-7, atol=1e-6)
        else:
            assert half["work"][name] == work, name
    layers = sum(4 * len(work) for name, work in plain["work"].items() if ".layers." in name)
    gathers = 2 * 4 / 2  # for the forward and the backward pass of four batches over two ranks
    assert plain["gathered"] - half["gathered"] == gathers * layers / 2
    assert half["gathered"] < 0.7 * plain["gathered"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_of_ranks_give_the_same_work_and_evaluation(written, tmp_path):
    """The defaults of several GPUs, as far as a CPU supports them: compiled layers, gathered in bfloat16."""
    hparams, found = written("demo", precision="bfloat16"), []
    for compiled in (False, True):
        place, settings = tmp_path / str(compiled), {"gather_bfloat16": True, "compile": compiled}
        ended = run_ranks(2, place, "worked", hparams=hparams, folder=str(place), settings=settings)
        found.append(ended_well(ended, 2))
    plain, fast = found
    for name, work in plain["work"].items():
        apart = np.linalg.norm(np.subtract(fast["work"][name], work))
        assert apart < 0.02 * np.linalg.norm(work), name  # bfloat16's rounding
    assert fast["gathered"] == plain["gathered"]
    for name, value in plain["measured"].items():
        assert fast["measured"][name] == pytest.approx(value, abs=2e-3), name
