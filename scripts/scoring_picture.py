"""Draws the picture of docs/scoring.md: the evidence of 20 windows about eight miners, and their resulting pay.

    python scripts/scoring_picture.py

The evidence is synthetic; the validator's own code computes the scores.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from tplr.hparams import load_hparams
from tplr.schemas import VALID, Alignment, Evidence, PeerObservation, Reason, published
from tplr.scoring.board import Board
from tplr.scoring.own_pages import FEWEST_OTHERS

PICTURE = Path(__file__).parents[1] / "docs" / "scoring.png"
WINDOWS, TESTS = 20, 5  # two thirds of the miners, as docs/scoring.md recommends
APPLIED, MEASURED, ABSENT, STRUCK, BLANK = "#4c9f70", "#a9d6b8", "#eeeeee", "#d1495b", "#ffffff"
NAMES = (
    "honest",
    "honest, larger effort",
    "joins in window 5",
    "sends every second window",
    "goes dark after 12 windows",
    "trains on other pages",
    "signs flipped",
    "noise",
)
GAINS = (0.20, 0.26, 0.20, 0.20, 0.20, 0.20, -0.20, 0.0)
BLIND = 8  # the validator's own data failed in this window


def observed(uid: int, window: int) -> PeerObservation:
    """Return the observation of a miner before tests."""
    seen = PeerObservation(hotkey=NAMES[uid], listed=True, included=True, verdict=VALID, assigned_pages=True, behind=0)
    away = {"included": False, "verdict": Reason.MISSING.value, "assigned_pages": None}
    probation = {"included": False, "listed": False, "probation": True}
    if uid == 2 and window < 5:
        return seen.model_copy(update={**away, "verdict": None, "listed": False})
    struck, off = uid == 0 and 15 < window < 19, uid == 5 and window > 8  # off the list: temporarily, or permanently
    if (uid == 2 and window < 9) or window < 3 or uid in (6, 7) or struck or off:
        return seen.model_copy(update=probation)
    if (uid == 3 and window % 2) or (uid == 4 and window >= 12):
        return seen.model_copy(update=away)
    return seen.model_copy(update={"behind": -1}) if (uid, window) == (0, 15) else seen


def evidence(window: int, board: Board, random: np.random.Generator) -> Evidence:
    """Return a window's evidence: gains with noise, and own-pages tests of the drawn uids."""
    seen = {uid: observed(uid, window) for uid in range(len(NAMES))}
    uids = [uid for uid, one in seen.items() if one.verdict == VALID]
    if window == BLIND:
        unseen = {str(uid): one.model_copy(update={"assigned_pages": None}) for uid, one in seen.items()}
        return Evidence(window=window, observations=unseen)
    gains = np.array([GAINS[uid] for uid in uids]) + 0.02 * random.standard_normal(len(uids))
    gram = np.outer(gains, gains) * 4 + np.eye(len(uids)) * 0.8
    alignment = Alignment(
        uids=tuple(uids),
        products=published(gains),
        norms=(1.0,) * len(uids),
        gram=published(gram[np.triu_indices(len(uids))]),
    )
    if len(uids) > FEWEST_OTHERS + 1:
        for uid in board.sample({uid: NAMES[uid] for uid in uids}, window, seed=1000 + window):
            on_pages = gains + 0.015 * random.standard_normal(len(uids))
            on_pages[uids.index(uid)] += 0.12 if uid < 5 else 0.0
            seen[uid] = seen[uid].model_copy(update={"sampled": True, "assigned_products": published(on_pages)})
    return Evidence(window=window, observations={str(uid): one for uid, one in seen.items()}, alignment=alignment)


def colour(one: Evidence, uid: int, struck: bool) -> str:
    """Return the colour of a window's cell."""
    seen = one.observations[str(uid)]
    if struck:
        return STRUCK
    if seen.verdict != VALID:
        return ABSENT
    if one.alignment is None and seen.included:
        return BLANK
    return APPLIED if seen.included else MEASURED


def main() -> None:
    hparams = load_hparams().model_copy(update={"pay_windows": WINDOWS, "uids_per_window": TESTS})
    board, random = Board(hparams), np.random.default_rng(7)
    figure, (cells, pay) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3.2, 1), layout="constrained")
    for window in range(WINDOWS):
        one = evidence(window, board, random)
        struck = board.see(one).struck
        for uid in range(len(NAMES)):
            row = len(NAMES) - 1 - uid
            face = colour(one, uid, uid in struck)
            cells.add_patch(Rectangle((window, row), 0.92, 0.82, facecolor=face, edgecolor="#888888", linewidth=0.6))
            if one.observations[str(uid)].sampled:
                cells.plot(window + 0.46, row + 0.41, "o", color="black", markersize=4)
    cells.set(xlim=(-0.2, WINDOWS), ylim=(-0.2, len(NAMES)), xlabel="window")
    cells.set_xticks(np.arange(0, WINDOWS, 2) + 0.46, range(0, WINDOWS, 2))
    cells.set_yticks(len(NAMES) - 1 - np.arange(len(NAMES)) + 0.41, NAMES)
    weights = [100 * board.weights.get(uid, 0.0) for uid in range(len(NAMES))]
    rows = len(NAMES) - 1 - np.arange(len(NAMES)) + 0.41
    pay.barh(rows, weights, height=0.6, color=APPLIED)
    for row, share in zip(rows, weights, strict=True):
        pay.text(share + 1, row, f"{share:.0f} %", va="center")
    pay.set(ylim=(-0.2, len(NAMES)), xlim=(0, 1.25 * max(weights)), xlabel="share of the pay, %")
    pay.set_yticks([])
    for axes in (cells, pay):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
    kinds = {"applied and measured": APPLIED, "on probation: measured": MEASURED, "absent: zero": ABSENT}
    kinds |= {"a rule struck: zero": STRUCK, "the validator's own fault: blank": BLANK}
    marks: list[Artist] = [Patch(facecolor=face, edgecolor="#888888", label=name) for name, face in kinds.items()]
    marks.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=4, label="own-pages test"))
    figure.legend(handles=marks, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(PICTURE, dpi=110)
    for uid, one in board.peer_scores.items():
        print(f"{NAMES[uid]:28s} credit {one.credit:.3f}, own pages {one.own_pages:.2f} after {one.tests} tests")


if __name__ == "__main__":
    main()
