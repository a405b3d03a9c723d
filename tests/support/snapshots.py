"""Saved states of one process."""

from tplr.node.state import SavedState, StateFolder


def save(folder: StateFolder, *, window: int, **what) -> SavedState:
    """Save like a node; ``what`` are further arguments of ``StateFolder.begin``."""
    draft = folder.begin(window=window, **{"start_window": 0, "global_step": 0, "version": "1", "values": {}} | what)
    draft.write()
    return folder.finish(draft)
