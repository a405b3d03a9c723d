"""Start-up checks: report all problems at once, each with its remedy, before the node starts."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tplr.chain.base import Neuron
from tplr.errors import ChainUnavailable, ConfigError, HubUnavailable, RateLimited, StoreUnavailable, TplrError

T = TypeVar("T")
P = ParamSpec("P")

# For all services together, which are asked concurrently: their own clients would retry for a minute or more.
ANSWER_SECONDS = 15.0
MISCONFIGURED, OUTSIDE_DOWN, OUTDATED = 2, 3, 4
# Errors that may disappear without a change on this machine.
OUTSIDE = (ChainUnavailable, HubUnavailable, RateLimited, StoreUnavailable)


def answers_due() -> float:
    """Return the time, in the running loop's clock, by which services that are asked now must answer."""
    return asyncio.get_running_loop().time() + ANSWER_SECONDS


@dataclass(frozen=True)
class Problem:
    """A problem that a check found. ``outside``: a service outside this machine is down, and may recover by itself."""

    check: str
    text: str
    outside: bool


class Checks:
    """Runs checks, and collects their problems.

    Attributes:
        neuron: this hotkey's neuron on the subnet; None until it is found.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.neuron: Neuron | None = None
        self._given_up: set[asyncio.Future[Any]] = set()

    @property
    def status(self) -> int:
        """The exit status for these problems: 2 if the node is misconfigured, 3 if only outside services are down."""
        return OUTSIDE_DOWN if all(problem.outside for problem in self.problems) else MISCONFIGURED

    def outside_down(self, name: str) -> bool:
        """Return whether the check ``name`` found an outside service that does not answer."""
        return any(problem.outside for problem in self.problems if problem.check == name)

    def take(self, name: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``make(...)``; if it raises TplrError, record its problems and return None."""
        try:
            return make(*args, **kwargs)
        except TplrError as error:
            self._note(name, error)
            return None

    async def wait(self, name: str, coming: Awaitable[T], *, until: float | None = None) -> T | None:
        """As ``take``, for an awaitable. At ``until``, a time of the loop, it is cancelled and not waited for."""
        task = asyncio.ensure_future(coming)
        try:
            await asyncio.wait({task}, timeout=until and until - asyncio.get_running_loop().time())
            if not task.done():
                text = f"no answer within {ANSWER_SECONDS:g} s: check the network and try again"
                self._add(Problem(name, text, outside=True))
                return None
        finally:
            if not task.done():
                self._give_up(task)
        try:
            return task.result()
        except TplrError as error:
            self._note(name, error)
            return None

    def _give_up(self, task: asyncio.Future[Any]) -> None:
        """Cancel ``task`` without waiting for it: closing a connection to a server that does not answer takes long."""

        def ended(task: asyncio.Future[Any]) -> None:
            self._given_up.discard(task)
            if not task.cancelled():
                task.exception()  # retrieve it, so that asyncio does not log it

        self._given_up.add(task)
        task.add_done_callback(ended)
        task.cancel()

    def _note(self, name: str, error: TplrError) -> None:
        found = error.problems if isinstance(error, ConfigError) else (str(error),)
        for text in found:
            self._add(Problem(name, text, isinstance(error, OUTSIDE)))

    def _add(self, problem: Problem) -> None:
        # Two checks may need the same setting.
        if problem not in self.problems:
            self.problems.append(problem)

    def show(self) -> None:
        """Print all problems as one table on standard error, by check."""
        title = "This node can't start"
        if self.status == OUTSIDE_DOWN:
            title += ": an external service is down, try again"
        table = Table(title=title, title_justify="left", show_lines=True)
        table.add_column("check", no_wrap=True)
        table.add_column("problem and remedy", overflow="fold")
        for problem in sorted(self.problems, key=lambda one: one.check):
            table.add_row(problem.check, escape(problem.text))
        Console(stderr=True).print(table)


def check_device(name: str, ranks: int = 1) -> torch.device:
    """Return the torch device of that name.

    Raises:
        ConfigError: this machine has no such device, or fewer GPUs than it has ``ranks``.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine, for instance --device cpu"
        ) from error
    if device.type == "cuda" and (found := torch.cuda.device_count()) < ranks:
        raise ConfigError(f"--device cuda: {found} GPUs for {ranks} ranks: start at most {found}")
    return device
