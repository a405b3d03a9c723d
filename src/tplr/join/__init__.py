"""The description of a run by its owner, and the steps by which a newcomer joins it (``docs/run.md``)."""
