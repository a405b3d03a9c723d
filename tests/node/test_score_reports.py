"""Sealed score reports are kept on disk, survive a kill, and are published when the weights are in force."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from reports import score_report

from tplr.comms import Comms
from tplr.errors import ObjectNotFound, PreconditionFailed, ScoresSealed, StoreUnavailable
from tplr.exchange.scores import released_after, seal_of
from tplr.hparams import HParams, load_hparams
from tplr.node.score_reports import ScoreReports
from tplr.schemas import PeerScore, ScoreReport, ScoreSeal
from tplr.telemetry import Telemetry

SEALED = load_hparams()
LATEST = released_after(SEALED)


class Bucket:
    """The part of ``Comms`` that publishes, and reads this validator's published documents."""

    uid = 0

    def __init__(self) -> None:
        self.seals: dict[int, ScoreSeal] = {}
        self.reports: dict[int, ScoreReport] = {}
        self.fails: list[Exception] = []

    async def put_scores_seal(self, seal: ScoreSeal) -> None:
        if self.fails:
            raise self.fails.pop()
        if seal.window in self.seals and self.seals[seal.window].sha256 != seal.sha256:
            raise PreconditionFailed("exists")
        self.seals.setdefault(seal.window, seal)

    async def put_scores(self, report: ScoreReport) -> None:
        if self.fails:
            raise self.fails.pop()
        self.reports[report.window] = report

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        if self.fails:
            raise self.fails.pop()
        if uid != self.uid or window not in self.reports:
            raise (ScoresSealed if window in self.seals else ObjectNotFound)("no")
        return self.reports[window]


class Validator:
    """Its bucket, its folder, and its events; ``reports`` are those of a newly started process."""

    def __init__(self, folder: Path) -> None:
        self.bucket = Bucket()
        self.folder = folder
        self.problems: list[str] = []

    def reports(self, hparams: HParams = SEALED) -> ScoreReports:
        def note(event: Any) -> None:
            self.problems.append(event["text"])

        telemetry = Telemetry(role="validator", uid=0, listeners=(note,))
        return ScoreReports(cast(Comms, self.bucket), telemetry, hparams, self.folder)

    @property
    def waiting(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def validator(tmp_path: Path) -> Validator:
    return Validator(tmp_path / "scores")


def report(window: int, final: float = 0.1) -> ScoreReport:
    scores = {"1": PeerScore(hotkey="miner", final=final, mean=1 / 3)}
    return score_report(window, peer_scores=scores, weights={"1": 1.0})


async def test_a_sealed_report_is_readable_when_weights_that_follow_are_in_force(validator) -> None:
    reports = validator.reports()
    for window in (5, 6, 7):
        await reports.publish(report(window), weights_due=9)
        await reports.release(None, newest=window + 2)
    assert sorted(validator.bucket.seals) == [5, 6, 7]
    assert (validator.bucket.reports, len(validator.waiting)) == ({}, 3)
    await reports.release(6, newest=10)
    assert sorted(validator.bucket.reports) == [5, 6]
    assert validator.waiting == ["window-7-v1"]
    for window, one in validator.bucket.reports.items():
        seal = validator.bucket.seals[window]
        assert (seal.sha256, seal.weights_due) == (seal_of(one, weights_due=0).sha256, 9)
        assert one == one.sealed()
        assert one.model_copy(update={"salt": "", "seal": ""}) == report(window)
        assert len(one.salt) == 64
    assert len({one.salt for one in validator.bucket.reports.values()}) == 2


async def test_in_any_case_it_is_published_while_it_can_be_audited(validator) -> None:
    reports = validator.reports()
    await reports.publish(report(5), weights_due=9)
    await reports.release(None, newest=5 + LATEST - 1)
    assert validator.bucket.reports == {}
    await reports.release(None, newest=5 + LATEST)
    assert sorted(validator.bucket.reports) == [5]


async def test_reports_in_the_clear_are_published_at_once(validator) -> None:
    reports = validator.reports(SEALED.model_copy(update={"sealed_scores": False}))
    made = report(5).sealed()
    await reports.publish(made, weights_due=9)
    assert (validator.bucket.reports, validator.bucket.seals, validator.waiting) == ({5: made}, {}, [])


async def test_what_was_sealed_survives_the_process(validator) -> None:
    before = validator.reports()
    await before.publish(report(5), weights_due=9)
    after = validator.reports()
    kept = await after.kept(5)
    assert kept is not None
    assert seal_of(kept, weights_due=0).sha256 == validator.bucket.seals[5].sha256
    assert await after.kept(6) is None
    await after.publish(report(6), weights_due=12)
    await after.release(6, newest=10)
    assert sorted(validator.bucket.reports) == [5, 6]
    assert (validator.waiting, validator.problems) == ([], [])
    assert await validator.reports().kept(5) is None


async def test_a_process_that_died_before_the_hash_was_published_leaves_the_window_as_scored(validator) -> None:
    validator.bucket.fails = [StoreUnavailable("killed here")]
    await validator.reports().publish(report(5), weights_due=9)
    assert validator.bucket.seals == {}
    after = validator.reports()
    assert await after.kept(5) is not None  # so it is not scored again
    await after.seal(weights_due=9)
    assert sorted(validator.bucket.seals) == [5]


async def test_what_was_made_before_a_restart_is_read_from_disk_and_bucket(validator) -> None:
    before = validator.reports()
    for window in (5, 6, 8):
        await before.publish(report(window), weights_due=9)
    await before.release(5, newest=9)
    (validator.folder / "window-8-v1").unlink()  # sealed, and lost
    assert [one.window for one in await validator.reports().made(range(4, 9))] == [5, 6]
    validator.bucket.fails = [StoreUnavailable("away")]
    assert [one.window for one in await validator.reports().made([5, 6])] == [6]
    assert validator.problems == ["own scores of window 5, on which later ones depend, not read: away"]


async def test_what_fails_is_tried_again(validator) -> None:
    reports = validator.reports()
    validator.bucket.fails = [StoreUnavailable("away")]
    await reports.publish(report(5), weights_due=9)
    await reports.release(5, newest=7)  # nothing is published before its hash
    assert (validator.bucket.seals, validator.bucket.reports) == ({}, {})
    await reports.publish(report(6), weights_due=9)
    assert sorted(validator.bucket.seals) == [5, 6]
    validator.bucket.fails = [StoreUnavailable("away")]
    await reports.release(None, newest=8)
    assert validator.bucket.reports == {}
    await reports.release(None, newest=8)  # weights of window 5 were in force already
    assert sorted(validator.bucket.reports) == [5]
    assert [text.split(":")[0] for text in validator.problems] == [
        "hash of the scores of window 5 not published",
        "scores not published",
    ]


async def test_nothing_but_the_sealed_report_is_ever_published(validator) -> None:
    """A validator that lost its disk scores the window again."""
    await validator.reports().publish(report(5), weights_due=9)
    (validator.folder / "window-5-v1").unlink()
    again = validator.reports()
    assert await again.kept(5) is None
    await again.publish(report(5, final=0.2), weights_due=9)
    await again.release(5, newest=7)
    assert (validator.bucket.reports, validator.waiting) == ({}, [])
    assert "scores of window 5 dropped: the hash of another report is published" in validator.problems[0]


async def test_a_damaged_file_is_reported_and_removed(validator) -> None:
    await validator.reports().publish(report(5), weights_due=9)
    path = validator.folder / "window-5-v1"
    path.write_bytes(path.read_bytes()[:-9])
    (validator.folder / "window-7-v2").write_bytes(b"of another version")
    reports = validator.reports()
    assert await reports.kept(5) is None
    assert "sealed scores of window 5 lost" in validator.problems[0]
    assert validator.waiting == ["window-7-v2"]


async def test_a_full_disk_costs_the_report_and_not_the_validator(validator, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tplr.files.os.fsync", full)
    await validator.reports().publish(report(5), weights_due=9)
    assert "scores not stored, so neither sealed nor published" in validator.problems[0]
    assert validator.bucket.seals == {}
    assert validator.waiting == []


async def test_what_is_released_while_the_next_window_is_scored_is_not_reported_as_lost(validator, monkeypatch) -> None:
    reports = validator.reports()
    assert await reports.kept(5) is None
    await reports.publish(report(5), weights_due=9)
    unlink = Path.unlink

    def slowly(path: Path, **options: bool) -> None:
        deleting.set()
        assert listed.wait(5)
        unlink(path, **options)

    deleting, listed = threading.Event(), threading.Event()
    monkeypatch.setattr(Path, "unlink", slowly)
    releasing = asyncio.ensure_future(reports.release(5, newest=7))
    assert await asyncio.to_thread(deleting.wait, 5)
    assert await reports.kept(6) is None
    listed.set()
    await releasing
    monkeypatch.undo()
    await reports.seal(weights_due=9)
    await reports.publish(report(6), weights_due=9)
    assert sorted(validator.bucket.reports) == [5]
    assert validator.problems == []
