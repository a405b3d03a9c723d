"""A terminal for commands: rich's, but a reader that has ended is an error for the caller to handle."""

from rich.console import Console as RichConsole


class Console(RichConsole):
    """Rich's console; prints to standard output unless told otherwise.

    Raises:
        BrokenPipeError: in ``print``, if nobody reads the output any more. Rich ends the process with status 1.
    """

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich is handling."""
        raise  # noqa: PLE0704 - rich calls this in its except block
