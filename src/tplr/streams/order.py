"""Order: a pure function from position to item, so one number is its whole state."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

from tplr.permutation import Permutation
from tplr.sharding import check_stride, per_rank
from tplr.streams.iterator import StreamIterator
from tplr.streams.round_robin import WeightedRoundRobin

T = TypeVar("T")
U = TypeVar("U")

MAX_MIX_PERIOD = 1 << 16


@dataclass(frozen=True)
class Order(Generic[T]):
    """Items by position, each computed on request, independently of the others.

        windows = Order.of(store, "store/").permute(seed=1).share(rank, world)
        windows[10**6]               # in constant time
        for window in windows.iter({"consumed": 4000}): ...

    Attributes:
        length: number of items; None if it is endless.
        at: the item at a position in ``[0, length)``.
        name: describes the order in one line; orders with equal names are equal.
        shared: rank and number of ranks, if ``share`` was the last change of positions.
    """

    length: int | None
    at: Callable[[int], T]
    name: str
    shared: tuple[int, int] | None = None

    @classmethod
    def of(cls, items: Sequence[T], name: str = "sequence") -> "Order[T]":
        """The items of anything with ``len`` and ``[i]``."""
        return Order(len(items), items.__getitem__, f"{name}[{len(items)}]")

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self.name} is infinite and has no len(); take(n) gives its first n items")
        return self.length

    def __getitem__(self, position: int) -> T:
        """Negative positions count from the end. Raises IndexError outside."""
        length = self.length
        if length is not None and position < 0:
            position += length
        if position < 0 or (length is not None and position >= length):
            raise IndexError(f"position {position} of {self.name}")
        return self.at(position)

    def __iter__(self) -> Iterator[T]:
        return self.iter()

    def map(self, function: Callable[[T], U], name: str = "map") -> "Order[U]":
        """Apply ``function`` to a shallow copy of each item, on request."""
        return Order(self.length, partial(_mapped, function, self.at), f"{self.name}.{name}", self.shared)

    def permute(self, seed: int | str, epoch: int = 0) -> Self:
        """The same items in the order of ``Permutation(length, seed, epoch)``, in constant memory."""
        fixed = self._fixed()
        places = Permutation(len(fixed), seed, epoch)
        return fixed._then(f"permute({seed!r}, {epoch})", at=partial(_permuted, fixed.at, places))

    def repeat(self, seed: int | str | None = None) -> Self:
        """Endless epochs; with ``seed`` each in the order of ``Permutation(length, seed, epoch)``.

        Raises:
            ValueError: the order is empty.
        """
        fixed = self._fixed()
        length = len(fixed)
        if not length:
            raise ValueError(f"{fixed.name} is empty and can't be repeated")
        at = partial(_repeated, fixed.at, length) if seed is None else _Reshuffled(fixed.at, length, seed)
        return fixed._then(f"repeat({'' if seed is None else repr(seed)})", length=None, at=at)

    def take(self, count: int) -> Self:
        """The first ``count`` items, or all if there are fewer."""
        if count < 0:
            raise ValueError(f"take({count}): expected 0 or more")
        fixed = self._fixed()
        length = count if fixed.length is None else min(count, fixed.length)
        return fixed._then(f"take({count})", length=length, at=fixed.at)

    def stride(self, interval: int, offset: int) -> Self:
        """Positions ``offset``, ``offset + interval``, …; lengths of different offsets may differ by one."""
        check_stride(interval, offset)
        fixed = self._fixed()
        length = None if fixed.length is None else max(0, -((offset - fixed.length) // interval))
        return fixed._then(
            f"stride({interval}, {offset})", length=length, at=partial(_strided, fixed.at, interval, offset)
        )

    def share(self, rank: int, world: int) -> Self:
        """Every ``world``-th item from ``rank`` on; each rank gets ``length // world``, the remainder is dropped.

        The first k items of all ranks are the first ``k * world`` items, so a state taken after them fits any number of
        ranks that divides ``k * world``.
        """
        check_stride(world, rank)
        fixed = self._fixed()
        length = None if fixed.length is None else fixed.length // world
        shared = fixed._then("share", length=length, at=partial(_strided, fixed.at, world, rank))
        return replace(shared, shared=(rank, world))

    @staticmethod
    def mix(orders: "Sequence[Order[T]]", weights: Sequence[float]) -> "Order[T]":
        """Deterministic weighted round-robin over several orders (``WeightedRoundRobin``); ends when the first ends.

        Raises:
            ValueError: as ``WeightedRoundRobin``, or the weights have a period above 65,536: give them fewer digits.
        """
        schedule = WeightedRoundRobin(weights)
        if len(orders) != len(weights):
            raise ValueError(f"mix: {len(orders)} orders and {len(weights)} weights")
        if schedule.period > MAX_MIX_PERIOD:
            raise ValueError(
                f"mix: weights {list(weights)} repeat after {schedule.period} items only; give fewer digits"
            )
        fixed = [order._fixed() for order in orders]
        places: list[tuple[int, int]] = []  # of one period: index of the order, and number of its items before
        counts = [0] * len(orders)
        for _ in range(schedule.period):
            index = schedule.next()
            places.append((index, counts[index]))
            counts[index] += 1

        ends = []  # positions at which an order would run out
        for index, order in enumerate(fixed):
            if order.length is not None and counts[index]:
                periods, before = divmod(order.length, counts[index])
                ends.append(periods * len(places) + places.index((index, before)))
        name = f"mix({', '.join(f'{order.name}: {weight!r}' for order, weight in zip(fixed, weights, strict=True))})"
        return Order(min(ends, default=None), partial(_mixed, [order.at for order in fixed], places, counts), name)

    def iter(self, state: dict[str, Any] | None = None) -> "OrderIterator[T]":
        """Iterate from the beginning, or from a state of the iterator. Raises StateError if it does not fit."""
        return OrderIterator(self, state)

    def _fixed(self) -> Self:
        """Return the same order with positions of this rank only; its name then includes the share."""
        if self.shared is None:
            return self
        rank, world = self.shared
        return replace(self, name=f"{self.name}[{rank} of {world}]", shared=None)

    def _then(self, name: str, **changes: Any) -> Self:
        return replace(self, **({"name": f"{self.name}.{name}"} | changes))


# Functions from position to item: of the module, so that an order can be sent to a spawned worker.


def _mapped(function: Callable[[T], U], at: Callable[[int], T], position: int) -> U:
    return function(copy.copy(at(position)))


def _permuted(at: Callable[[int], T], places: Permutation, position: int) -> T:
    return at(places[position])


def _strided(at: Callable[[int], T], interval: int, offset: int, position: int) -> T:
    return at(position * interval + offset)


def _repeated(at: Callable[[int], T], length: int, position: int) -> T:
    return at(position % length)


def _mixed(ats: list[Callable[[int], T]], places: list[tuple[int, int]], counts: list[int], position: int) -> T:
    """Return an item of a mix; ``places`` and ``counts`` are those of one period of its schedule."""
    periods, place = divmod(position, len(places))
    index, before = places[place]
    return ats[index](periods * counts[index] + before)


@dataclass(eq=False)
class _Reshuffled(Generic[T]):
    """Endless epochs, each in the order of ``Permutation(length, seed, epoch)``."""

    at: Callable[[int], T]
    length: int
    seed: int | str
    current: tuple[int, Permutation] | None = field(default=None, init=False)  # its keys cost more than an index

    def __call__(self, position: int) -> T:
        epoch, index = divmod(position, self.length)
        current = self.current
        if current is None or current[0] != epoch:
            current = self.current = (epoch, Permutation(self.length, self.seed, epoch))
        return self.at(current[1][index])


class OrderIterator(StreamIterator[T]):
    """Iterates over an order; ``state()`` is ``{"consumed": number of items that all ranks took}``."""

    def __init__(self, order: Order[T], state: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._order = order
        self._world = order.shared[1] if order.shared else 1
        self._position = per_rank(state["consumed"], self._world) if state else 0

    def items(self) -> Iterator[T]:
        at, length = self._order.at, self._order.length
        while length is None or self._position < length:
            item = at(self._position)
            self._position += 1
            yield item

    def state(self) -> dict[str, Any]:
        return {"consumed": self._position * self._world}
