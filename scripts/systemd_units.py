"""Write the units of ``docker/systemd`` with ``tplr.join.unit``; a test compares the files with its output."""

from pathlib import Path

from tplr.join.unit import install, standard_unit

FOLDER = Path(__file__).parents[1] / "docker" / "systemd"

if __name__ == "__main__":
    for role in ("miner", "validator", "aggregator"):
        install(standard_unit(role), FOLDER)
