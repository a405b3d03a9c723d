"""The owners of uids in a past window: by the chain, or if it has dropped that state, by a validator's scores."""

from tplr.chain import ChainManager
from tplr.errors import ChainUnavailable
from tplr.schemas import ScoreReport

MAX_HOTKEY = 128  # letters of a hotkey in a report


async def uid_owners(chain: ChainManager, window: int, scores: ScoreReport | None) -> dict[int, str]:
    """Return the hotkeys by uid at the end of ``window``, without those that are not known.

    Args:
        scores: a score report of the window.

    Raises:
        ChainUnavailable: the window has not ended, or the chain does not answer.
    """
    try:
        return await chain.hotkeys_in(window)
    except ChainUnavailable as error:
        if error.name != "StateDiscarded":
            raise
    return {int(uid): seen.hotkey[:MAX_HOTKEY] for uid, seen in scores.observations.items()} if scores else {}
