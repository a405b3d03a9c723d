"""What a localnet leaves for readers: hparams, chain, keys, buckets and wallets in the folder of its run."""

from pathlib import Path

from tplr.errors import ConfigError


def check_kept(run: Path) -> None:
    """Raise ConfigError if the folder holds no run, or one whose buckets were deleted."""
    for name in ("hparams.json", "chain.sqlite", "keys.json", "storage", "wallets"):
        if not (run / name).exists():
            raise ConfigError(
                f"{run}: no {name}, so it has no localnet with kept buckets (--keep results deletes them): give "
                "--local FOLDER of another run"
            )
