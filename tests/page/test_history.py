"""The history of a run stays after its buckets and processes are gone."""

import pytest

from tplr.errors import ConfigError
from tplr.page.document import Checkpoint, Evaluation
from tplr.page.history import History, MinerScore, WindowRecord

SCORE = MinerScore(pay=0.5, credit=0.25, struck=("empty",), rows=(("weight", "0.5"),))
FULL = WindowRecord(window=7, included=(1,), skipped={2: "missing"}, models={0: "aa", 1: "aa"}, scores={1: SCORE})


def checkpoint(window: int, *, kept: bool = True) -> Checkpoint:
    return Checkpoint(window=window, uid=0, bytes=10, kept=kept)


def test_a_later_look_adds_and_takes_nothing_away() -> None:
    sealed = WindowRecord(window=7, included=(1,), models={0: "aa"}, unread="sealed until window 9")
    assert sealed.completed_by(FULL) == FULL
    later = WindowRecord(window=7, models={3: "bb"}, unread="deleted")
    both = FULL.completed_by(later)
    assert both == FULL.model_copy(update={"models": {0: "aa", 1: "aa", 3: "bb"}})
    assert sealed.completed_by(later).unread == "deleted"


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"probation": (1, 2)}, {"included": (), "probation": (1, 2), "tokens": 0, "decided": "c"}),
        (
            {"included": (1, 2), "tokens": 900},
            {"included": (), "skipped": {1: "unavailable"}, "tokens": 0, "decided": "v"},
        ),
        ({"included": (1,), "skipped": {2: "missing"}}, {"included": (1, 2), "tokens": 900, "decided": "c"}),
    ],
)
def test_the_included_set_is_that_of_one_read_also_if_it_is_empty(first: dict, later: dict) -> None:
    undecided, decided = WindowRecord(window=7, **first), WindowRecord(window=7, **later)
    assert undecided.completed_by(decided) == decided
    assert decided.completed_by(undecided) == decided


def test_a_history_is_kept_in_its_file(tmp_path) -> None:
    path = tmp_path / "folder" / "history.jsonl"
    history = History("run 1", path)
    history.add([FULL], [checkpoint(3), checkpoint(8)])
    figure = Evaluation(window=7, task="held-out pages", metric="bits per byte", value=1.5, error=None, uid=0)
    history.add([WindowRecord(window=8)], [checkpoint(8)], [figure])
    again = History("run 1", path)
    assert again.windows == {7: FULL, 8: WindowRecord(window=8)} == history.windows
    assert again.checkpoints == {(3, 0): checkpoint(3, kept=False), (8, 0): checkpoint(8)} == history.checkpoints
    assert list(again.evaluations.values()) == [figure]
    # Unchanged windows are not written again.
    size = path.stat().st_size
    again.add([FULL], [checkpoint(8)])
    assert path.stat().st_size == size


def test_a_torn_line_is_not_read(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    History("run 1", path).add([FULL, WindowRecord(window=8)], [])
    path.write_bytes(path.read_bytes()[:-20])
    assert set(History("run 1", path).windows) == {7}
    # The file is complete again.
    History("run 1", path).add([WindowRecord(window=9)], [])
    assert set(History("run 1", path).windows) == {7, 9}


def test_another_runs_history_is_refused(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    History("run 1", path).add([FULL], [])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"not a history of this run \(run 2\): give another file with --history"):
        History("run 2", path)
    path.write_bytes(before + b'{"window": "seven"}\n')
    with pytest.raises(ConfigError, match="a damaged line"):
        History("run 1", path)
    assert History("run 3").windows == {}
