"""The own-pages test: tests whether a miner trained on its assigned pages.

The validator computes the gradient on these pages, and aligns it with the updates of *all* miners. Pages differ in the
same way for all miners, so the update trained on them stands out. The indicator is that it stands out more on its own
pages than on those of other miners, which are measured in the same way.

With products a_jk of update j with the gradient on the pages of miner k, and b_j with that on held-out pages, all
divided by the updates' norms:

    e_jk = a_jk - r_k * b_j                 r_k: weighted median of a_jk / b_j over the others
    d_jk = e_jk - mean of e_jq and 0        over the tests q of the same window on pages of neither k nor j
    t_jk = (d_jk - E[d_jk | others]) / (standard deviation given the others)

"Others" are all updates of the included set except those of j and k, and copies of j; that of k is excluded because k
trained on the pages. Updates on probation are no others: anybody can have many of them, and if they are trained on the
pages of k, that of k does not stand out among them. So no number of newcomers changes the test of an included miner.
All updates are others if none is included, and for newcomers if too few are.

    indicator of a test of j = part of all k != j with t_jk < t_jj, minus part with t_jk > t_jj

Subtracting the mean in d removes most of the noise of b. The noise in d is that of a gradient along all updates, so its
covariance is their Gram matrix R, and the expected value of d_j follows from those of the others:
``E = R_jo R_oo^-1 d_o``, with the variance ``R_jj - R_jo R_oo^-1 R_oj`` times a common factor, estimated from the
others' own residuals (Rasmussen, Williams, "Gaussian Processes for Machine Learning" (2006), equations 2.19 and 5.12).

Ranks need no model of the tails of the noise. A miner that trained elsewhere has a mean indicator of 0, because its own
pages are no different from others for it. (Mann, Whitney, "On a Test of Whether one of Two Random Variables is
Stochastically Larger than the Other", Annals of Mathematical Statistics 18 (1947).)
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tplr.scoring.credit import SHORTEST, Aligned, gram_of
from tplr.scoring.measures import NORMAL

# Fewest other updates, without that of the pages' miner, from which the noise can be estimated.
FEWEST_OTHERS = 2
# Fewest tests on other miners' pages, to know an update's deviations on pages that it was not trained on.
FEWEST_OTHER_PAGES = 2
# Updates with this correlation beyond the common gradient may be copies, so they are not compared with each other.
COPY_COSINE = 0.4
RIDGE = 0.1
TINY = 1e-12


def indicator(on_own: float, on_others: Sequence[float]) -> float:
    """Return how an update stands out on its own pages, in [-1, 1]; 0 on average if it was trained elsewhere.

    Args:
        on_own, on_others: its ``deviations`` on its own pages, and on those of other miners (at least one).
    """
    return sum((on_own > one) - (on_own < one) for one in on_others) / len(on_others)


def deviations(
    tests: Mapping[int, Sequence[float]],
    alignment: Aligned,
    included: Collection[int],
    *,
    only: int | None = None,
) -> dict[tuple[int, int], float]:
    """Return each update's deviation from its prediction by others, by its uid and the pages' uid.

    Deviations are in standard deviations.
    Updates with too few others for comparison are left out.

    Args:
        tests: by uid, products of all updates with the gradient on its pages, in the order of ``alignment.uids``.
        alignment: of the same updates with the gradient on held-out pages, and with each other.
        included: uids of the window's included set, also of updates that were not measured.
        only: uid of the one update that is asked for; all of 256 take seconds.
    """
    products, gram = np.array([alignment.products, *tests.values()], dtype=np.float64), gram_of(alignment)
    (known,) = np.nonzero(np.diag(gram) > SHORTEST)
    uids, pages = np.asarray(alignment.uids), np.array([*tests])
    found: dict[tuple[int, int], float] = {}
    for compared, tested in _groups(known, np.isin(uids[known], [*included])):
        mine = tested if only is None else tested[uids[tested] == only]
        if len(pages) and len(mine) and len(compared) > FEWEST_OTHERS + 1:
            square = gram[np.ix_(compared, compared)]
            positions = np.searchsorted(compared, mine)
            found |= _among(pages, uids[compared], products[:, compared], square, positions)
    return found


def _groups(known: np.ndarray, included: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return which updates are compared with each other, and which of them are tested by that: ascending indices.

    Args:
        known: indices of the updates that can be compared, ascending.
        included: bool, which of these are in the included set.
    """
    inside, newcomers = known[included], known[~included]
    if not len(inside):
        return [(known, known)]
    if len(inside) <= FEWEST_OTHERS:
        return [(inside, inside), (known, newcomers)]
    return [(inside, inside), *((np.sort([*inside, one]), np.array([one])) for one in newcomers)]


def _among(
    pages: np.ndarray, uids: np.ndarray, products: np.ndarray, gram: np.ndarray, tested: np.ndarray
) -> dict[tuple[int, int], float]:
    """Return ``deviations`` of some updates among all the given ones.

    Args:
        pages: uids whose pages the gradients are of, int64 [pages].
        uids: of the updates, int64 [updates].
        products: of the updates with the gradient on held-out pages and with these, float64 [1 + pages, updates].
        gram: the updates' products with each other, float64 [updates, updates].
        tested: indices of the updates to compare with the others.
    """
    length = np.sqrt(np.diag(gram))
    cosines, of_gradients = gram / np.outer(length, length), products / length
    held_out, on_pages = of_gradients[0], of_gradients[1:]
    copies, inverse = _find_copies(cosines, held_out), np.linalg.inv(cosines + RIDGE * np.eye(len(uids)))
    trained_there = pages[:, None] == uids  # [pages, updates]
    found: dict[tuple[int, int], float] = {}
    for mine in tested.tolist():
        if np.count_nonzero(~copies[mine]) <= FEWEST_OTHERS:
            continue
        compared = ~(trained_there | copies[mine])
        slopes = [_slope(row[others], held_out[others]) for row, others in zip(on_pages, compared, strict=True)]
        rest = on_pages - np.outer(slopes, held_out)
        elsewhere = np.where(trained_there, 0.0, rest)
        other_pages = (~trained_there).sum(axis=0) - ~trained_there
        rest = rest - (elsewhere.sum(axis=0) - elsewhere) / (other_pages + 1)
        for page, row, others in zip(pages.tolist(), rest, compared, strict=True):
            if np.count_nonzero(others) >= FEWEST_OTHERS:
                found[int(uids[mine]), page] = _ahead(row, mine, others, cosines, inverse)
    return found


def _ahead(rest: np.ndarray, mine: int, others: np.ndarray, cosines: np.ndarray, inverse: np.ndarray) -> float:
    """Return a residual's deviation from its prediction by the others' residuals, in standard deviations.

    ``R_oo^-1`` is a Schur complement of ``inverse``. Only its products with vectors and its diagonal are computed,
    because every update and every test has another one.

    Args:
        rest: residuals of all updates on one miner's pages, float64 [updates].
        others: bool [updates].
        inverse: of all cosines with the ridge, float64 [updates, updates].
    """
    (left_out,) = np.nonzero(~others)
    across = np.linalg.solve(inverse[np.ix_(left_out, left_out)], inverse[left_out])
    both = np.where(others, np.stack([cosines[mine], rest]), 0.0)
    solved = both @ inverse
    towards, residuals = solved - solved[:, left_out] @ across
    diagonal = np.diag(inverse) - np.einsum("lo,lo->o", inverse[left_out], across)
    variance = max(1 + RIDGE - both[0] @ towards, TINY)
    size = np.median(np.abs(residuals[others] / np.sqrt(diagonal[others])))
    spread = NORMAL * float(size) * math.sqrt(variance)
    return float(rest[mine] - both[1] @ towards) / max(spread, TINY)


def _find_copies(cosines: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return which updates are copies of each other, or the same: bool [updates, updates]."""
    ridge = RIDGE * np.eye(len(gains))
    explained = gains @ np.linalg.solve(cosines + ridge, gains)
    rest = cosines + ridge - np.outer(gains, gains) / max(explained, TINY)
    size = np.sqrt(np.maximum(np.diag(rest), TINY))
    return (rest / np.outer(size, size) >= COPY_COSINE) | np.eye(len(gains), dtype=bool)


def _slope(on_pages: np.ndarray, held_out: np.ndarray) -> float:
    """Return the weighted median of the ratios: the least absolute deviation slope through the origin."""
    some = np.abs(held_out) > TINY
    if not some.any():
        return 0.0
    ratios, weights = on_pages[some] / held_out[some], np.abs(held_out[some])
    order = np.argsort(ratios, kind="stable")
    reached = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(reached, reached[-1] / 2)])
