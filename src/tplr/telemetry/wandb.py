"""Charts events in Weights & Biases; needs the extra ``wandb``."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from tplr.errors import ConfigError
from tplr.logging import logger
from tplr.telemetry.events import HEADER, SEALED, Event


class WandbListener:
    """One W&B run: every number of an event becomes ``{event}/{field}``, over the window.

    Events that a validator seals are left out, because a run's charts may be public. Its score reports have them later.

    The constructor and closing block. Events do not block, because W&B sends from a separate process. If that process
    ends, this is logged once, and the node goes on without it.
    """

    def __init__(self, project: str, *, name: str) -> None:
        """Start a W&B run. Raises ConfigError if the extra is not installed, or W&B rejects the run."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb.project needs the extra: .venv/bin/pip install -e '.[wandb]'") from error
        try:
            self._run = wandb.init(project=project, name=name)
        except wandb.Error as error:
            raise ConfigError(f"--wandb.project {project}: {error}; run 'wandb login', or leave it out") from error
        self._lost = False

    def __call__(self, event: Event) -> None:
        if event["event"] in SEALED:
            return
        numbers = {
            f"{event['event']}/{name}": value
            for name, value in event.items()
            if name not in HEADER and isinstance(value, int | float)
        }
        if numbers:
            self._send(lambda: self._run.log(numbers | {"window": event.get("window", -1)}))

    def _send(self, send: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001 - of its client, a socket or asyncio; charts must not end the node
            self._lost = True
            logger.warning("W&B gets no more events until the node is restarted: %r", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(lambda: self._run.finish(exit_code=0 if error is None else 1))
