"""The second trained window leaves a readable trace."""

import json

import pytest

from tplr.errors import ConfigError
from tplr.training.gradient import WindowGradient
from tplr.training.model import build_model
from tplr.training.profile import BATCHES, WindowProfile


@pytest.mark.parametrize("count", [3, BATCHES + 4])
def test_the_second_window_is_traced(count, tiny, batches, tmp_path):
    model = build_model(tiny("demo", layers=1))
    local, profile = WindowGradient("float32"), WindowProfile(tmp_path / "new")
    for window in (7, 8, 9):
        work = profile.run(
            lambda *, stop: local.run(model, batches(0, count), step=0, stop=stop), window, stop=lambda: False
        )
        assert work.train_stats.batches == count
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["window-8.trace.json"]
    events = json.loads((tmp_path / "new" / "window-8.trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert any("aten::mm" in str(name) or "aten::linear" in str(name) for name in names)
    assert any("Backward" in str(name) for name in names)


def test_stop_is_asked_while_profiling(tiny, batches, tmp_path):
    model = build_model(tiny("demo", layers=1))
    local, profile = WindowGradient("float32"), WindowProfile(tmp_path)
    for _ in range(2):
        answers = iter([False, True])
        work = profile.run(lambda *, stop: local.run(model, batches(0, 4), step=0, stop=stop), 1, stop=answers.__next__)
        assert (work.train_stats.batches, work.train_stats.stopped) == (1, True)


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--profile"):
        WindowProfile(tmp_path / "file" / "below")
