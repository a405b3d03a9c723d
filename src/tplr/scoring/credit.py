"""Temporary stand-in of part C's credit."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Credit(NamedTuple):
    value: float
    mean: float
    error: float


def credit(windows: Sequence[Any], counted: Sequence[Mapping[int, bool | None]]) -> dict[int, Credit]:
    uids = sorted(set().union(*counted))
    n = len(uids)
    at = {uid: i for i, uid in enumerate(uids)}
    b, gram = np.full((len(windows), n), np.nan), np.zeros((n, n))
    for w, (one, mask) in enumerate(zip(windows, counted, strict=True)):
        upper = np.zeros((len(one.uids),) * 2)
        upper[np.triu_indices(len(one.uids))] = one.gram
        whole = upper + np.triu(upper, 1).T
        rows = [i for i, uid in enumerate(one.uids) if mask.get(uid)]
        cols = [at[one.uids[i]] for i in rows]
        gram[np.ix_(cols, cols)] += whole[np.ix_(rows, rows)]
        for uid, seen in mask.items():
            if seen is not None:
                b[w, at[uid]] = one.products[one.uids.index(uid)] if seen else 0.0
    seen = (~np.isnan(b)).astype(float)
    gram /= np.maximum(1, seen.T @ seen)
    result = {}
    means, errors = np.zeros(n), np.zeros(n)
    for i in range(n):
        x = b[~np.isnan(b[:, i]), i]
        if len(x):
            means[i] = x.mean()
            y = x[x != 0]
            errors[i] = (
                (np.sqrt((np.diff(y) ** 2).sum() / (2 * (len(y) - 1)) / len(y)) * len(y) / len(x))
                if len(y) > 1
                else abs(means[i])
            )
    t = np.where(means > 0, means * np.maximum(0, 1 - (2 * errors / np.where(means > 0, means, 1)) ** 2), 0)
    a = gram + 0.1 * max(gram.trace() / max(1, (gram.diagonal() > 0).sum()), 1e-12) * np.eye(n)
    beta = np.zeros(n)
    for _ in range(500):
        for i in range(n):
            beta[i] = max(0.0, (t[i] - a[i] @ beta + a[i, i] * beta[i]) / a[i, i])
    for i, uid in enumerate(uids):
        result[uid] = Credit(float(beta[i] * t[i]), float(means[i]), float(errors[i]))
    return result
