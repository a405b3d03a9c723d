"""Compares the weights that a validator has on chain with those in its published score reports."""

from tplr.errors import ChainError, PayloadError, StoreError
from tplr.logging import logger
from tplr.node.network_reader import NetworkReader
from tplr.node.payment import ROUNDING, difference
from tplr.node.replay import published_windows

NAMED = 5  # largest weights that are named
# Weights in force are late if they are older than so many intervals between two settings of weights.
LATE = 2


async def unexplained_weights(network: NetworkReader, validator: int) -> str | None:
    """Describe a validator's weights in force if they are in none of its newest reports, or only in an old one.

    This is not proof against the validator: the report may be sealed, deleted or not published by its own fault, and
    the chain may have refused newer weights, or keep them sealed.

    Returns:
        None if nothing is to be said, or if the validator has no weights.
    """
    comms, hparams = network.comms, network.hparams
    try:
        row = (await comms.chain.weights()).get(validator, {})
        limit = await comms.chain.max_weight()
        windows = await published_windows(network, validator, "scores") if row else []
    except (ChainError, StoreError) as error:
        return f"its weights on chain are not compared: {error}"
    if not row or (hparams.burn_uid is not None and difference(row, {hparams.burn_uid: 1.0}, limit) <= ROUNDING):
        return None
    newest: int | None = None
    for window in reversed(windows[-hparams.pay_windows :]):
        try:
            report = await comms.get_scores(validator, window)
        except (PayloadError, StoreError) as error:
            logger.info("window %d: weights on chain not compared with its report: %s", window, error)
            continue
        newest = window if newest is None else newest
        stated = {int(uid): weight for uid, weight in report.weights.items() if weight > 0}
        if difference(row, stated, limit) <= ROUNDING:
            if newest - window <= LATE * hparams.windows_per_weights:
                return None
            return f"its weights on chain are those of window {window}, and its newest readable report is of {newest}"
    largest = sorted(row.items(), key=lambda one: (-one[1], one[0]))[:NAMED]
    named = ", ".join(f"uid {uid} {weight:.4f}" for uid, weight in largest) + (", …" if len(row) > NAMED else "")
    return f"its weights on chain ({named}) are those of none of its readable reports"
