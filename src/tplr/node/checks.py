"""Start-up checks: report all problems at once, each with its remedy, before the node starts."""

from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tplr.errors import ConfigError, TplrError

T = TypeVar("T")
P = ParamSpec("P")


class Checks:
    """Runs checks, and collects their problems by name."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []

    def take(self, name: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of ``make(...)``, or None if it raised TplrError, whose problems are recorded."""
        try:
            return make(*args, **kwargs)
        except TplrError as error:
            self._note(name, error)
            return None

    async def wait(self, name: str, coming: Awaitable[T]) -> T | None:
        """As ``take``, for an awaitable."""
        try:
            return await coming
        except TplrError as error:
            self._note(name, error)
            return None

    def _note(self, name: str, error: TplrError) -> None:
        found = error.problems if isinstance(error, ConfigError) else (str(error),)
        # Two checks may need the same setting.
        self.problems += [(name, problem) for problem in found if (name, problem) not in self.problems]

    def show(self) -> None:
        """Print all problems as one table on standard error."""
        table = Table(title="This node can't start", title_justify="left", show_lines=True)
        table.add_column("check", no_wrap=True)
        table.add_column("problem and what to do", overflow="fold")
        for name, problem in self.problems:
            table.add_row(name, escape(problem))
        Console(stderr=True).print(table)


def check_device(name: str) -> torch.device:
    """The torch device of that name. Raises ConfigError if this machine has no such device."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine, for instance --device cpu"
        ) from error
    return device
