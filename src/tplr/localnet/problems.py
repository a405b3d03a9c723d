"""Shows why a localnet can't start."""

from rich.markup import escape
from rich.table import Table

from tplr.console import Console
from tplr.errors import ConfigError


def show_problems(error: ConfigError) -> None:
    """Print all problems as one table on standard error."""
    table = Table(title="This localnet can't start", title_justify="left", show_header=False, show_lines=True)
    table.add_column(overflow="fold")
    for problem in error.problems:
        table.add_row(escape(problem))
    Console(stderr=True).print(table)
