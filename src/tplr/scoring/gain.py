"""Predicted gain of a window's updates, from all gradients that a validator computed in the window.

The own-pages tests align all updates with a gradient on the pages of each tested miner. For every other miner these are
pages that it did not train on, like the held-out ones. So an update's predicted gain is the median of its products with
the gradient on held-out pages, and with those on the pages of the other tested miners. With 16 tests these are up to 17
gradients instead of one, at no cost, so there is less noise in it.

Unlike held-out pages, a miner's pages are known before the window ends. The median is not moved far by fewer than half
of them: by a copy's product on the pages of the copied miner, or by an owner that trains on the pages of its own uids.
Anybody can have many newcomers, so at most half as many tests of other miners count as of miners in the included set:
an owner of all of these also needs a quarter of the included ones. If a test is missing, the gradient on held-out pages
is the only one: otherwise a validator could choose any of the gradients by the faults that it claims.
``calibration.py`` finds what is fitted to known pages after all, by the held-out gradient alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tplr.schemas import Evidence
from tplr.scoring.credit import Aligned


def own_pages_products(evidence: Evidence) -> dict[int, tuple[float, ...]]:
    """Return the products of all updates with the gradient on the pages of each tested miner, by its uid."""
    return {int(uid): one.assigned_products for uid, one in evidence.observations.items() if one.assigned_products}


def due_tests(evidence: Evidence) -> list[int]:
    """Return the uids that were sampled and measured, ascending: of the tests that a validator without faults makes."""
    seen = {int(uid): one for uid, one in evidence.observations.items()}
    measured = evidence.alignment.uids if evidence.alignment else ()
    return [uid for uid in measured if uid in seen and seen[uid].sampled]


def predicting_tests(evidence: Evidence) -> dict[int, tuple[float, ...]]:
    """Return the tests that predict gains; none if the test of a sampled and measured miner is missing.

    These are all tests of included miners, and half as many of others, in the order of their uids; all tests while no
    update is included, as before a run's first peer list, because nobody is paid for such a window.
    """
    found, due = own_pages_products(evidence), due_tests(evidence)
    seen = {int(uid): one for uid, one in evidence.observations.items()}
    if any(uid not in found for uid in due):
        return {}
    if not any(one.included for one in seen.values()):
        return {uid: found[uid] for uid in due}
    included = [uid for uid in due if seen[uid].included]
    others = [uid for uid in due if not seen[uid].included]
    return {uid: found[uid] for uid in (*included, *others[: len(included) // 2])}


def predicted_gains(alignment: Aligned, tests: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return each update's predicted gain, by uid.

    Args:
        alignment: of the window's updates with the gradient on held-out pages.
        tests: by uid, products of the same updates with the gradient on its pages, in the order of ``alignment.uids``.
    """
    if not alignment.uids:
        return {}
    found = np.array([alignment.products, *tests.values()], dtype=np.float64)  # [gradients, updates]
    trained_there = np.array([*tests])[:, None] == np.asarray(alignment.uids)
    found[1:][trained_there] = np.nan
    return dict(zip(alignment.uids, np.nanmedian(found, axis=0).tolist(), strict=True))
