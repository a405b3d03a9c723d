"""Start-up checks: everything that is wrong at once, with what to do, before anything is begun."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tplr.errors import ConfigError, TplrError


class Checks:
    """Collects problems by the name of the check that found them."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Note what the block raises and go on behind it; checks that need its result ask ``passed``."""
        try:
            yield
        except ConfigError as error:
            self.problems += [(name, problem) for problem in error.problems]
        except TplrError as error:
            self.problems.append((name, str(error)))

    def passed(self, *names: str) -> bool:
        """Whether none of the named checks found a problem."""
        return not {name for name, _ in self.problems} & set(names)

    def show(self) -> None:
        """Print all problems as one table on standard error."""
        table = Table(title="This node can't start", title_justify="left", show_lines=True)
        table.add_column("check", no_wrap=True)
        table.add_column("problem and what to do", overflow="fold")
        for name, problem in self.problems:
            # Square brackets in an error are no markup.
            table.add_row(name, problem.replace("[", r"\["))
        Console(stderr=True).print(table)
