"""The card is the record in words: it has nothing else, and no name can add markup."""

import pytest

from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.run.card import CURVE_POINTS, render_card
from tplr.run.record import Contributor, ExportRecord, WindowFacts

HPARAMS = HParams.model_validate(scheme_constants("demo"))


def record(**changes) -> ExportRecord:
    windows = tuple(
        WindowFacts(window=w, fingerprint="ab" * 32, batches={"1": 2, "2": None}, held_out_loss=8 - 0.01 * w)
        for w in range(3, 103)
    )
    values = {
        "tplr": "0.1.0",
        "version": "1",
        "netuid": 3,
        "start_window": 3,
        "window": 102,
        "global_step": 100,
        "fingerprint": "ab" * 32,
        "agreed": True,
        "digest": "cd" * 32,
        "dtype": "float32",
        "dataset": "ef" * 32,
        "batch_tokens": 1024,
        "credit_window": 101,
        "files": {},
        "windows": windows,
        "contributors": (
            Contributor(uid=1, hotkey="5Key", windows=100, tokens=204_800, credit=0.5),
            Contributor(uid=2, hotkey="", windows=100, tokens=0, credit=None),
        ),
        "evaluations": (),
    }
    return ExportRecord(**values | changes)


def test_facts_are_in_the_card() -> None:
    card = render_card(record(), HPARAMS)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert (
        "| tokens trained on, as updates report | 204,800 (updates of 100 windows are deleted, and not counted) |"
        in card
    )
    assert "| 1 | `5Key` | 100 | 204,800 | 0.500000 |" in card
    assert "| 2 | unknown | 100 | 0 | unknown |" in card
    assert "tplr export --window 102 --dtype float32 --hparams hparams.json --netuid 3 --out ../recomputed" in card
    assert '"target_chunk": 64' in card


def test_the_curve_has_its_ends_and_few_points() -> None:
    card = render_card(record(), HPARAMS)
    rows = [line for line in card.splitlines() if line.count("|") == 3 and line.split("|")[1].strip().isdecimal()]
    assert CURVE_POINTS // 2 <= len(rows) <= CURVE_POINTS + 1
    assert rows[0].startswith("| 3 |")
    assert rows[-1].startswith("| 102 |")


@pytest.mark.parametrize("hotkey", ["<script>alert(1)</script>", "`|\n# Best model", "[x](http://y)"])
def test_a_name_adds_no_markup(hotkey) -> None:
    contributor = Contributor(uid=1, hotkey=hotkey, windows=1, tokens=1, credit=None)
    card = render_card(record(contributors=(contributor,)), HPARAMS)
    plain = render_card(record(contributors=(contributor.model_copy(update={"hotkey": "x"}),)), HPARAMS)
    assert len(card.splitlines()) == len(plain.splitlines())
    assert not set("<>[]()") & set(next(line for line in card.splitlines() if line.startswith("| 1 | `")))


def test_a_run_without_published_windows_says_so() -> None:
    card = render_card(record(windows=(), contributors=(), credit_window=None), HPARAMS)
    assert "No window's report is published." in card
    assert "No published score report has a loss on held-out pages." in card
    assert "| windows of which anything is published | none |" in card
