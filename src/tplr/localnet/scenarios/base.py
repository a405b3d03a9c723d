"""The small network of a scenario: its settings, its budgets, and what its miners are paid."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tplr.localnet.attackers import Scaled
from tplr.localnet.plan import Scheme
from tplr.localnet.simulation import Member, World, profile, small

Figures = dict[str, float]
EFFORT = 24  # sequences of an average miner, of at most 64
PAID_WINDOWS = 20
GATHERED = 15
MEASURED = 64  # sequences of a gradient or a loss, as in the project's hparams files
PROBATION = 3  # windows
LAUNCH = 6  # windows until the first peer list with earned places
FEW = 4  # own-pages tests in a window, instead of 16: each of 24 miners takes one test in six windows
FEW_TESTS = "few tests, "  # prefix of the names of their figures


@dataclass(frozen=True)
class Setting:
    """The settings of a scenario's run. ``vocabulary``: ``simulation.VOCABULARY`` or ``SINGLE_BYTES``."""

    scheme: Scheme
    vocabulary: int
    seed: int


def network(setting: Setting, members: Sequence[Member], *, pages: int = 8, tests: int | None = None) -> World:
    """Return a network with ``pages`` pages of 8 sequences for each miner, and production's budgets.

    Args:
        tests: number of miners that take the own-pages test in a window, instead of production's.
    """
    constants = profile(setting.scheme)
    hparams = small(
        constants,
        uids_per_window=tests or constants.uids_per_window,
        vocabulary=setting.vocabulary,
        max_topk_peers=GATHERED,
        probation_windows=PROBATION,
        pages_per_window=pages,
        validator_sample_rate=1e-3,  # so low that ``evaluation_sequences`` decides
        evaluation_sequences=MEASURED,
    )
    return World(hparams, members, seed=setting.seed, measures_loss=False)


def few_tests(figures: Callable[[Setting, int], Figures]) -> Callable[[Setting], Figures]:
    """Return a scenario with ``FEW`` own-pages tests in a window, from one that takes their number."""
    return lambda setting: {f"{FEW_TESTS}{name}": value for name, value in figures(setting, FEW).items()}


def live(world: World, windows: int) -> World:
    """Run a network for ``windows`` windows, and return it."""
    asyncio.run(world.run(windows))
    return world


def pay(world: World, uids: Iterable[int]) -> list[float]:
    """Return the shares of the pay of these uids."""
    weights = world.board.weights
    return [weights.get(uid, 0.0) for uid in uids]


def ratio(one: float, other: float) -> float:
    """Return ``one / other``: infinite if only ``other`` is 0, and 0 if both are."""
    return one / other if other else (math.inf if one else 0.0)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def tenfold(effort: int) -> Member:
    """Return a miner that sends honest updates of ten times their norm, which honest training could have."""
    return Scaled("tenfold norm", effort, 10.0)
