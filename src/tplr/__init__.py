"""templar: strangers train one large language model together over the open internet.

``import tplr`` imports nothing else: each name below is imported at its first use.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tplr.comms import Comms
    from tplr.hparams import load_hparams
    from tplr.r2_dataset import R2DatasetLoader

    __version__: str

__all__ = ["Comms", "R2DatasetLoader", "__version__", "load_hparams"]

_MODULES = {"Comms": "tplr.comms", "R2DatasetLoader": "tplr.r2_dataset", "load_hparams": "tplr.hparams"}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return metadata.version("tplr")
        if name not in _MODULES:
            raise AttributeError(f"module 'tplr' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
