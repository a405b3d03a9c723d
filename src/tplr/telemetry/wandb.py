"""Charts events in Weights & Biases; needs the extra ``wandb``."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from tplr.errors import ConfigError
from tplr.logging import logger
from tplr.telemetry.events import HEADER, SEALED, Event

# A node starts and ends without W&B if it does not answer for so long.
INIT_SECONDS, FINISH_SECONDS = 30.0, 15.0


class WandbListener:
    """One W&B run: every number of an event becomes ``{event}/{field}``, over the window.

    Events that a validator seals are left out, because a run's charts may be public. Its score reports have them later.

    The constructor and closing block. Events do not block, because W&B sends from a separate process. If W&B does not
    answer at the start, or that process ends, this is logged once, and the node goes on without it. Closing gives up
    what W&B does not take in ``FINISH_SECONDS``.
    """

    def __init__(self, project: str, *, name: str) -> None:
        """Start a W&B run. Raises ConfigError without the extra, for a bad variable, or if W&B rejects the run."""
        try:
            import wandb
            from wandb.errors import CommError
        except ImportError as error:
            raise ConfigError("--wandb.project needs the extra: .venv/bin/pip install -e '.[wandb]'") from error
        self._lost = False
        try:
            limits = wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS)
            self._run = wandb.init(project=project, name=name, settings=limits)
        except ValidationError as error:  # its settings are read from the environment
            found = error.errors(include_url=False, include_input=False)
            names = ["_".join(("WANDB", *map(str, one["loc"]))).upper() for one in found]
            problems = [f"{name}: {one['msg']}" for name, one in zip(names, found, strict=True)]
            raise ConfigError(problems) from None
        except wandb.Error as error:
            # The client has one class of errors for answers that refuse and answers that do not come.
            if not isinstance(error, CommError) or "timed out" not in str(error).lower():
                raise ConfigError(f"--wandb.project {project}: {error}; run 'wandb login', or leave it out") from error
            self._lost = True
            logger.warning("W&B gets no events until the node is restarted: %s", str(error).partition("\n")[0])

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
