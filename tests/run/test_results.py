"""The folder of results: changed or damaged files are not used."""

import json

from tplr.run.results import read_result, read_results, result_path, results_of, write_result
from tplr.schemas import EvaluationResult, HeldOutLoss


def result(window: int, digest: str = "ab" * 32) -> EvaluationResult:
    return EvaluationResult(
        window=window,
        version="1",
        global_step=window,
        digest=digest,
        precision="float32",
        held_out=HeldOutLoss(pages="cd" * 32, nats_per_token=3.0, bits_per_byte=1.5, tokens=10, bytes=40),
        tasks={},
        command="tplr eval",
        tools={"tplr": "0.1.0"},
    )


def test_results_are_read_back_by_window(tmp_path):
    for window in (12, 7):
        write_result(result_path(tmp_path, "1", window, "asked"), result(window))
    write_result(result_path(tmp_path, "1", 7, "something else"), result(7, "ef" * 32))
    assert [one.window for one in read_results(tmp_path)] == [7, 7, 12]
    assert [one.window for one in results_of(tmp_path, digest="ef" * 32)] == [7]
    assert read_results(tmp_path / "none") == []


def test_a_changed_or_torn_result_is_not_used(tmp_path, caplog):
    path = result_path(tmp_path, "1", 7, "asked")
    write_result(path, result(7))
    assert read_result(path) == result(7).sealed()
    raw = json.loads(path.read_text())
    raw["held_out"]["bits_per_byte"] = 0.5
    path.write_text(json.dumps(raw))
    assert read_result(path) is None
    assert "its seal does not match, it was changed" in caplog.text
    path.write_text(path.read_text()[:100])
    assert read_result(path) is None
    assert "is not a valid EvaluationResult" in caplog.text
