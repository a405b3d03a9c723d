"""Credit: the predicted gain of a miner's updates (``gain.py``), shared with miners that send similar updates.

From the evidence of the last windows w, where ``y_iw`` is 1 if the update of i counted and else 0:

    b_i = mean_w y_iw e_w b_iw                 the gain, error_i its standard error; b_iw is the predicted gain of the
                                               window (``gain.py``), e_w is of ``even_scales``
    b'_i = b_i * max(0, 1 - (CHANCE * error_i / b_i)**2)      the gain beyond chance
    G_ij = mean_w y_iw y_jw <d_iw, d_jw>       similarity of two miners' updates
    c_i = b'_i / (p_i sqrt(b'' G^-1 b'))       inner products with the part of the gradient that updates explain, in a
                                               window that counts; p_i = mean_w y_iw
    M^ij_kl = <d_kw, d_lw> - c_k c_l           similarity that is not useful: mean over the windows w in which i and j
                                               both count
    r_ij = M^ij_ij / sqrt(M^ij_ii M^ij_jj)     its correlation in these windows
    o_ij = sum_w |d_iw| |d_jw| / sqrt(sum_w |d_iw|^2 sum_w |d_jw|^2)     how far their windows are the same
    A_ij = sqrt(A_ii A_jj) * o_ij * sqrt(max(0, r_ij)) * clip((r_ij - APART) / (ALIKE - APART), 0, 1)
    A_ii = p_i M^ii_ii
    beta = argmin_{beta >= 0} beta' A beta - 2 b'' beta
    own_i = beta_i * A_ii / b'_i               in [0, 1]: the part of the gain that is the miner's own
    credit_i = b'_i * own_i

All honest updates are alike in what they have of the gradient. The rest of each is noise of its own data, and
correlations of it up to ``APART`` count as none: so an honest miner's own part is 1. Of k clones each one's is 1 / k.
An update that is another one's plus noise explains little of the gradient that the other one does not. Its part is
small and not 0: measured credits are 0.01 to 0.48 of an honest miner's, by scheme and vocabulary
(docs/benchmarks/scoring.md). The own-pages factor is what makes its pay 0. The root makes clones with noise of their
own share as clones. Presence counts linearly. Clones share the windows that they have in common, however few each two
of them have: uids of one owner that take turns are paid as one. Where G^-1 and M have G's diagonal, it is longer by
``RIDGE``, and ``c_k c_l`` shorter; ``c_i`` is no longer than a step. Those who are to come ``first`` are solved for as
if alone, and the others then with their beta: a clone of one of the first gets nothing.

If updates have only the gradient in common, regression on M and on G has the same solution up to a common factor
(Sherman and Morrison). Regression on G would amplify the noise of b by the signal of all miners together.

Non-negative least squares: Lawson, Hanson, "Solving Least Squares Problems" (1974), chapter 23. Beyond chance: the
positive part of James and Stein (1961), for one number.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

# A mean product below this many standard errors counts as zero.
CHANCE = 2.0
# Weight, in windows, of the usual spread of all miners in the estimate of one miner's spread.
PRIOR_WINDOWS = 3.0
# Correlation of useless similarity up to which two updates are independent, and from which on they are the same.
APART, ALIKE = 0.15, 0.4
# Smallest ``<d, d>``, for a hundredth of the longest step: published numbers of shorter steps have too few digits.
SHORTEST = 1e-4
# Added to the diagonals, as a share of them.
RIDGE = 0.02
TOLERANCE = 1e-12
# Number of windows before and after a window whose gains give its usual gain, and the largest factor by it.
AROUND, MOST_EVEN = 3, 8.0


class Aligned(Protocol):
    """A window's evidence: ``training.alignment.Alignment``, or its record in a score report."""

    @property
    def uids(self) -> Sequence[int]: ...

    @property
    def products(self) -> Sequence[float]: ...

    @property
    def gram(self) -> Sequence[float]: ...


class Credit(NamedTuple):
    """A miner's credit.

    Attributes:
        value: ``beyond * own``; at least 0.
        mean: of its products with the gradient, over all windows that are not blank; a window that did not count is 0.
        error: standard error of ``mean`` from the spread of the windows that counted; ``mean`` if there is no spread
            to see yet.
        beyond: what of ``mean`` is beyond chance; at least 0.
        own: the part of ``beyond`` that is the miner's own, in [0, 1].
        shared: the parts of ``beyond`` that go to others for saying the same, by uid. With ``own`` they sum to 1, or to
            more where ``own`` is 0. Empty if ``beyond`` is 0, or its steps are too short to compare.
    """

    value: float
    mean: float
    error: float
    beyond: float = 0.0
    own: float = 0.0
    shared: Mapping[int, float] = MappingProxyType({})


def even_scales(gains: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the factor of each window that makes the usual gain equal in all windows.

    While a model is new, every update gains several times more than twenty windows later. Without these factors, a
    miner that missed one of the first windows would lose several windows' pay. A single window's usual gain is as
    uncertain as the gradient that measured it, so the median of the surrounding windows is used.

    Args:
        gains: of the included updates of each window, oldest first. A window without one, as before a run's first peer
            list, gets the factor of the nearest window with one: without a step the model hardly changes.

    Returns:
        float64 [windows], between ``1 / MOST_EVEN`` and ``MOST_EVEN``; 1 where the usual gain is not positive.
    """
    usual = [float(np.median(one)) if len(one) else math.nan for one in gains]
    around = np.array([_median(usual[max(0, i - AROUND) : i + AROUND + 1]) for i in range(len(usual))])
    around[np.isnan(usual) | (around <= 0)] = math.nan
    factors = np.nan_to_num(np.clip(_median(around) / around, 1 / MOST_EVEN, MOST_EVEN), nan=1.0)
    (known,) = np.nonzero(np.isfinite(usual))
    if not len(known):
        return factors
    nearest = np.abs(np.arange(len(gains))[:, None] - known).argmin(axis=1)
    return factors[known[nearest]]


def _median(values: Sequence[float] | np.ndarray) -> float:
    """Return the median of the known values; NaN if none is known."""
    known = [one for one in values if not math.isnan(one)]
    return float(np.median(known)) if known else math.nan


def credit(
    windows: Sequence[Aligned],
    counted: Sequence[Mapping[int, bool | None]],
    *,
    first: Collection[int] = (),
    scales: Sequence[float] | np.ndarray | None = None,
) -> dict[int, Credit]:
    """Compute credits by uid from the evidence of some windows, oldest first.

    Args:
        windows: products and Gram matrix of each window.
        counted: for each window and uid, whether its update counts; None if the window is blank for it. A missing uid
            does not count; a uid that counts must be among the window's uids.
        first: uids that get their part before the others. The others get only the rest, and nothing for repeating them.
        scales: factors of the windows' products, from ``even_scales``; None: 1.
    """
    uids = sorted(set().union(*counted)) if counted else []
    row = {uid: i for i, uid in enumerate(uids)}
    products = np.full((len(windows), len(uids)), np.nan)  # of what counted
    known = np.ones((len(windows), len(uids)), dtype=bool)
    gram = np.zeros((len(uids), len(uids)))
    lengths = np.zeros((len(windows), len(uids)))
    for window, (one, counts) in enumerate(zip(windows, counted, strict=True)):
        known[window, [row[uid] for uid, counts_it in counts.items() if counts_it is None]] = False
        places = [place for place, uid in enumerate(one.uids) if counts.get(uid)]
        rows = [row[one.uids[place]] for place in places]
        products[window, rows] = np.asarray(one.products, dtype=np.float64)[places]
        of_window = gram_of(one)[np.ix_(places, places)]
        gram[np.ix_(rows, rows)] += of_window
        lengths[window, rows] = np.sqrt(np.clip(np.diag(of_window), 0, None))
    if scales is not None:
        products *= np.asarray(scales)[:, None]
    seen = np.maximum(known.sum(axis=0), 1)
    means = np.nansum(products, axis=0) / seen
    there = np.isfinite(products).astype(np.float64)
    errors = means_and_errors(products)[1] * there.sum(axis=0) / seen
    beyond = means * np.clip(1 - np.square(CHANCE * errors / np.maximum(means, TOLERANCE)), 0, None)
    beyond[means <= 0] = 0.0
    (useful,) = np.nonzero((beyond > 0) & (np.diag(gram) > SHORTEST * seen))
    parts = np.zeros_like(gram)
    if len(useful):
        kept = np.ix_(useful, useful)
        alike = _alike(gram[kept], lengths[:, useful], there[:, useful], seen[useful], beyond[useful])
        parts[kept] = _parts(alike, beyond[useful], np.isin(uids, list(first))[useful])
    own = np.diag(parts)
    rows = zip(uids, beyond * own, means, errors, beyond, own, strict=True)
    return {uid: Credit(*map(float, one), shared=_others(parts[row[uid]], uids, uid)) for uid, *one in rows}


def _others(parts: np.ndarray, uids: Sequence[int], uid: int) -> dict[int, float]:
    return {other: part for other, part in zip(uids, parts.tolist(), strict=True) if part > 0 and other != uid}


def _alike(gram: np.ndarray, lengths: np.ndarray, there: np.ndarray, seen: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return the similarity of miners beyond what is useful, ``A`` above, [n, n].

    Args:
        gram: sum over windows, [n, n].
        lengths: of the steps, [windows, n]; 0 where a window does not count.
        there: 1 where a window counts, else 0; [windows, n].
        seen: number of windows that are not blank, [n].
        gains: b' above, all positive; [n].
    """
    # Over the root of both counts, a sum of Gram matrices stays one.
    whole = gram / np.sqrt(np.outer(seen, seen))
    # A false report may have no Gram matrix.
    explained = max(gains @ np.linalg.solve(whole + np.diag(RIDGE * np.diag(whole)), gains), TOLERANCE)
    presence = there.sum(axis=0) / seen
    # As ``c`` above, but no longer than a step: a miner's windows may be those with the fewest others.
    c = np.sqrt((1 - RIDGE) * np.minimum(np.square(gains / presence) / explained, np.diag(whole) / presence))
    size = (1 + RIDGE) * np.diag(whole) - presence * np.square(c)
    common = np.maximum(there.T @ there, 1)
    # [i, j]: of i, in the windows in which j counts, too.
    squares = (1 + RIDGE) * (np.square(lengths).T @ there) / common - np.square(c)[:, None]
    together = np.sqrt(np.clip(squares, 0, None) * np.clip(squares.T, 0, None))
    product = gram / common - np.outer(c, c)
    same = np.clip(np.divide(product, together, out=np.zeros_like(gram), where=together > 0), 0.0, 1.0)
    np.fill_diagonal(same, 1.0)
    overlap = (lengths.T @ lengths) / np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    return np.sqrt(np.outer(size, size)) * overlap * np.sqrt(same) * np.clip((same - APART) / (ALIKE - APART), 0.0, 1.0)


def _parts(alike: np.ndarray, gains: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Of each miner's gain (rows) the part of each miner (columns), [n, n], at least 0.

    The diagonal is what is a miner's own, at most 1. A row sums to 1, or to more where the others leave nothing.

    Args:
        alike: of ``_alike``.
        first: bool, whether the miner gets its part before the others.
    """
    # No Gram matrix, so it may not be positive definite.
    least = RIDGE * np.diag(alike).min()
    alike = alike + np.diag(np.full(len(gains), max(0.0, least - np.linalg.eigvalsh(alike)[0])))
    found = np.zeros(len(gains))
    for some in (first, ~first):
        left = gains[some] - alike[np.ix_(some, ~some)] @ found[~some]
        found[some] = non_negative(alike[np.ix_(some, some)], left)
    shares = found * alike / gains[:, None]
    shares[np.ix_(first, ~first)] = 0.0
    return shares


def non_negative(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return the ``x >= 0`` that minimises ``x' matrix x - 2 vector' x``, by Lawson and Hanson's active set method.

    Args:
        matrix: symmetric, positive definite, float64 [n, n]; or all zeros, for which ``x`` is 0.
    """
    found = np.zeros(len(vector))
    active = np.zeros(len(vector), dtype=bool)
    limit = TOLERANCE * np.abs(vector).max(initial=0.0)
    if not matrix.any():
        return found
    for _ in range(3 * len(vector)):
        slope = np.where(active, -np.inf, vector - matrix @ found)
        if slope.max(initial=-np.inf) <= limit:
            break
        active[slope.argmax()] = True
        while True:
            trial = np.zeros(len(vector))
            trial[active] = np.linalg.solve(matrix[np.ix_(active, active)], vector[active])
            below = active & (trial <= 0)
            if not below.any():
                break
            # As far towards the trial as nothing becomes negative; what becomes zero leaves the set.
            steps = found[below] / (found[below] - trial[below])
            found += steps.min() * (trial - found)
            leaving = below.copy()
            leaving[below] = steps <= steps.min()
            active &= ~leaving
            found[~active] = 0.0
        found = trial
    return found


def gram_of(one: Aligned) -> np.ndarray:
    """Return the whole Gram matrix of a window."""
    count = len(one.uids)
    gram = np.zeros((count, count))
    gram[np.triu_indices(count)] = one.gram
    return gram + np.triu(gram, 1).T


def means_and_errors(samples: np.ndarray, applied: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of each miner's samples, from successive differences, so that trends don't count.

    The spread of few samples may be small by chance. So each miner gets ``PRIOR_WINDOWS`` additional samples with the
    usual spread: the median over applied miners whose own samples have a mean beyond chance. Others set it only if
    there is no such miner, first those beyond chance: anybody can have many on probation, and may send anything. If no
    miner has two samples, an error is as large as the mean.

    von Neumann, "Distribution of the Ratio of the Mean Square Successive Difference to the Variance", Annals of
    Mathematical Statistics 12 (1941).

    Args:
        samples: [windows, miners], oldest first; NaN where there is none.
        applied: [miners], bool; None stands for all.
    """
    count = samples.shape[1]
    counts, sums, means = np.zeros(count), np.zeros(count), np.zeros(count)
    for i, column in enumerate(samples.T):
        values = column[np.isfinite(column)]
        counts[i], sums[i] = len(values), np.square(np.diff(values)).sum() / 2
        means[i] = values.mean() if len(values) else 0.0
    several = counts > 1
    if not several.any():
        return means, np.abs(means)
    spreads = sums / np.maximum(counts - 1, 1)
    helpful = several & (means > CHANCE * np.sqrt(spreads / np.maximum(counts, 1)))
    if applied is not None and (helpful & applied).any():
        helpful &= applied
    usual = np.median(spreads[helpful if helpful.any() else several])
    variances = (sums + PRIOR_WINDOWS * usual) / (np.maximum(counts - 1, 0) + PRIOR_WINDOWS)
    return means, np.sqrt(variances / np.maximum(counts, 1))
