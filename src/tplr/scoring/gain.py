"""Predicted gain of a window's updates, from all gradients that a validator computed in the window.

The own-pages tests align all updates with a gradient on the pages of each tested miner. For every other miner these are
pages that it did not train on, like the held-out ones. So an update's predicted gain is the median of its products with
the gradient on held-out pages, and with those on the pages of the other tested miners. With 16 tests these are up to 17
gradients instead of one, at no cost, so there is less noise in it.

Unlike held-out pages, a miner's pages are known before the window ends. The median is not moved far by fewer than half
of them: by a copy's product on the pages of the copied miner, or by an owner that trains on the pages of its own uids.
To move it, an update must be trained on pages of most tested miners, which are drawn after the window: then it has
learned a little of many pages. An owner of many newcomers may have most of the tested uids. It knows their pages, but
not which sequences of them are sampled (``docs/attackers.md``, "What this does not measure").
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tplr.scoring.credit import Aligned


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
