"""``tplr explain`` and ``tplr audit`` as commands on a chain file and a server: output and exit status."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from guides import from_guide

from tplr.cli.reported import FAILED
from tplr.exchange.scores import seal_of
from tplr.keys import scores_key
from tplr.node.audit import Auditor, Difference
from tplr.node.inspect_cli import AGREES, DIFFERS
from tplr.schemas import VALID, Alignment, Evaluation, Evidence, LossChange, PeerObservation, PeerScore, ScoreReport
from tplr.scoring.board import Board
from tplr.scoring.explain import explain, measured_window, shares_of

MINER, WINDOW = 1, 1


@pytest.fixture
async def stage(staged: Any) -> AsyncIterator[Any]:
    """A network whose window ``WINDOW`` and the next one have ended."""
    async with staged(manifest_timeout_seconds=0.5, blocks_per_window=1) as opened:
        yield opened


def report(uid: int) -> ScoreReport:
    return ScoreReport(
        window=WINDOW,
        uid=uid,
        profile="hardened",
        held_out_pages="",
        faults=(),
        observations={str(MINER): PeerObservation(hotkey="somebody", listed=True, behind=9)},
        alignment=None,
        follows_from=(),
        peer_scores={str(MINER): PeerScore(hotkey="somebody", final=0.5)},
        struck={str(MINER): ("out_of_sync",)},
        weights={str(MINER): 1.0},
        weights_set=None,
    ).sealed()


async def test_explain(stage, command, capsys, caplog) -> None:
    assert await command("explain", "--window", WINDOW, "--uid", MINER) == FAILED
    assert "no validator has a bucket on chain: give --validator" in caplog.text

    validator = (await stage.context(stage.setup("validator"))).comms
    assert await command("explain", "--uid", MINER) == FAILED
    assert f"validator {validator.uid} has published no scores" in caplog.text
    made = report(validator.uid)
    # First only their hash is published: the command prints when the scores will be readable.
    await validator.put_scores_seal(seal_of(made, weights_due=WINDOW + 3))
    assert await command("explain", "--window", WINDOW, "--uid", MINER) == FAILED
    assert f"due in window {WINDOW + 3}, and the scores are readable by window" in caplog.text
    await validator.put_scores(made)
    shares = shares_of(made, [measured_window(made, stage.hparams)], stage.hparams.probation_windows)
    expected = explain(made, MINER, power=stage.hparams.power_normalisation, shares=shares)
    assert "out_of_sync: it reports another model, is too far behind" in expected
    # Whoever lists scores can name any window, but none that has not ended.
    await validator.own_store.put(scores_key(10**9, validator.uid, stage.hparams.version), b"{}")
    windows = (("--window", WINDOW), (), ("--window", "latest"))
    for asked in (*windows, ("--validator", validator.uid)):
        capsys.readouterr()
        assert await command("explain", "--uid", MINER, *asked) == AGREES
        assert capsys.readouterr().out.strip() == expected

    assert await command("explain", "--window", WINDOW, "--uid", 77) == FAILED
    assert f"for window {WINDOW}, which has {MINER}" in caplog.text
    assert await command("explain", "--window", WINDOW + 1, "--uid", MINER) == FAILED
    assert f"validator {validator.uid} has published no scores of window {WINDOW + 1}" in caplog.text


def scored(board: Board, window: int, uid: int) -> ScoreReport:
    """Return the scores of a window in which two miners sent useful updates."""
    change = LossChange(before=4.0, after=3.9, error=0.001, sequences=64)
    evaluation = Evaluation(assigned=change, held_out=change)
    good = PeerObservation(
        hotkey="somebody", listed=True, included=True, verdict=VALID, assigned_pages=True, evaluation=evaluation
    )
    seen = {str(MINER): good, str(MINER + 1): good.model_copy(update={"hotkey": "another"})}
    aligned = Alignment(uids=(MINER, MINER + 1), products=(0.3, 0.2), norms=(1.0, 1.0), gram=(1.0, 0.1, 1.0))
    outcome = board.see(Evidence(window=window, observations=seen, alignment=aligned))
    changes = {
        "window": window,
        "observations": seen,
        "alignment": aligned,
        "follows_from": board.follows_from,
        "peer_scores": {str(miner): one for miner, one in outcome.peer_scores.items()},
        "struck": {},
    }
    return report(uid).model_copy(update=changes).sealed()


async def test_explain_reads_the_reports_that_a_credit_follows_from(stage, command, capsys) -> None:
    validator = (await stage.context(stage.setup("validator"))).comms
    board = Board(stage.hparams)
    first, second = (scored(board, window, validator.uid) for window in (WINDOW, WINDOW + 1))
    assert second.follows_from == (WINDOW,)

    async def publish(made: ScoreReport) -> None:
        await validator.put_scores_seal(seal_of(made, weights_due=made.window + 1))
        await validator.put_scores(made)

    async def credit(window: int) -> str:
        capsys.readouterr()
        assert await command("explain", "--window", window, "--uid", MINER) == AGREES
        [row] = [line[18:] for line in capsys.readouterr().out.splitlines() if line.startswith("credit ")]
        return row

    await publish(second)
    found = second.peer_scores[str(MINER)]
    assert isinstance(found, PeerScore)
    assert found.credit > 0
    unread = "not recomputed: an earlier report cannot be read"
    assert await credit(WINDOW + 1) == f"{found.credit:.6f}; {unread}"
    await publish(first)
    assert await credit(WINDOW + 1) == f"{0.3:.6f} x {1.0:.6f} = {found.credit:.6f}"


async def test_a_window_that_can_not_be_audited_is_an_error(
    stage, command, capsys, caplog, monkeypatch, tmp_path
) -> None:
    validator = (await stage.context(stage.setup("validator"))).comms
    assert await command("audit", "--window", WINDOW) == FAILED
    assert "the run has not started" in caplog.text
    await validator.post_start_window(WINDOW)
    assert await command("audit", "--window", WINDOW - 1) == FAILED
    assert f"window {WINDOW - 1} is before the run's first one, {WINDOW}: nothing to audit" in caplog.text
    latest = from_guide("docs/scoring.md", "tplr audit --window latest")
    assert await command(*latest.arguments) == FAILED
    assert f"validator {validator.uid} has published no scores" in caplog.text
    # What is not published is not a difference, and is said before anything is replayed.
    replayed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr("tplr.node.inspect_cli.load_state", lambda *given, **_: replayed.append(given))
        assert await command("audit", "--window", WINDOW) == FAILED
        assert f"validator {validator.uid} has published no scores of window {WINDOW}; it has none" in caplog.text
        made = report(validator.uid)
        await validator.put_scores_seal(seal_of(made, weights_due=WINDOW + 3))
        assert await command("audit", "--window", WINDOW) == FAILED
        assert f"due in window {WINDOW + 3}, and the scores are readable by window" in caplog.text
        await validator.put_scores(made)
        assert await command("audit", "--window", WINDOW + 7) == FAILED
        only = f"of window {WINDOW + 7}; those that it has are of windows {WINDOW} to {WINDOW}"
        assert f"validator {validator.uid} has published no scores {only}" in caplog.text
    assert replayed == []
    values = {"1234": WINDOW, "FOLDER": tmp_path / "empty"}
    given = from_guide("docs/scoring.md", "tplr audit --window 1234 --from FOLDER", values)
    assert await command(*given.arguments) == FAILED
    assert f"no saved state of this run of window {WINDOW} or before; give --from start" in caplog.text
    assert await command("audit", "--window", WINDOW) == FAILED
    assert f"window {WINDOW} not verified: validator {validator.uid} has not published it" in caplog.text
    given = from_guide("docs/scoring.md", "tplr audit --window 1234 --from checkpoint", {"1234": WINDOW})
    assert await command(*given.arguments) == FAILED
    assert f"no checkpoint of version {stage.hparams.version} of window {WINDOW} or before" in caplog.text
    assert await command(*from_guide("docs/monitoring.md", "tplr watch").arguments, "--once") == 0
    assert "no window is published yet" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        await command("audit", "--window", "last")
    assert refused.value.code == 2


@pytest.mark.parametrize("found", [None, Difference(WINDOW, "weights", 1, 2)])
async def test_an_audit_prints_what_it_believes(stage, command, capsys, monkeypatch, found) -> None:
    async def audit(self: Auditor, *_: object, **__: object) -> Difference | None:
        self.unverified.append(f"window {WINDOW}: steps behind of uids [3] not verified")
        return found

    async def audit_to(*arguments: Any, **options: Any) -> Difference | None:
        assert arguments[1] == WINDOW
        return await audit(*arguments, **options)

    monkeypatch.setattr(Auditor, "audit", audit_to)
    validator = (await stage.context(stage.setup("validator"))).comms
    await validator.post_start_window(WINDOW)
    await validator.put_scores(report(validator.uid))
    assert await command("audit", "--window", "latest") == (DIFFERS if found else AGREES)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"DIFFERS: window {WINDOW}: weights: published 1, found 2" if found else "AGREES: validator"
    )
    assert second == f"BELIEVED: window {WINDOW}: steps behind of uids [3] not verified"


async def test_weights_on_chain_that_are_in_no_report_are_named(stage, command, capsys, monkeypatch) -> None:
    """Reports may be honest and the weights not; they may also be those of a report that is not readable yet."""

    async def audit(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(Auditor, "audit", audit)
    validator = (await stage.context(stage.setup("validator"))).comms
    await validator.post_start_window(WINDOW)

    other = report(validator.uid).model_copy(update={"weights": {"5": 1.0}}).sealed()
    await validator.put_scores(other)

    async def believed() -> list[str]:
        assert await command("audit", "--window", WINDOW) == AGREES
        return capsys.readouterr().out.splitlines()[1:]

    assert await believed() == []  # it has no weights on chain
    await validator.set_weights({MINER: 1.0})
    (line,) = await believed()
    assert line == "BELIEVED: its weights on chain (uid 1 1.0000) are those of none of its readable reports"
    made = report(validator.uid).model_copy(update={"window": WINDOW + 1}).sealed()
    await validator.put_scores_seal(seal_of(made, weights_due=WINDOW + 3))
    assert len(await believed()) == 1
    await validator.put_scores(made)
    assert await believed() == []


async def test_a_result_that_can_not_be_recorded_is_printed(
    stage, command, capsys, caplog, monkeypatch, tmp_path
) -> None:
    """An audit may take hours; what is known at its start is refused there."""
    folder = tmp_path / "new"

    async def audit(*_: object, **__: object) -> None:
        folder.write_text("in the way")

    monkeypatch.setattr(Auditor, "audit", audit)
    validator = (await stage.context(stage.setup("validator"))).comms
    await validator.post_start_window(WINDOW)
    await validator.put_scores(report(validator.uid))
    words = ("audit", "--window", WINDOW, "--record", folder / "audits.jsonl")
    assert await command(*words) == FAILED
    assert capsys.readouterr().out.startswith("AGREES: validator")
    assert "File exists" in caplog.text
    assert await command(*words) == FAILED
    assert capsys.readouterr().out == ""
    assert f"--record {folder / 'audits.jsonl'}: {folder} is a file" in caplog.text
