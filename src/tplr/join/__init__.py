"""A run as its owner describes it, and how a newcomer's machine joins it (``docs/run.md``)."""
