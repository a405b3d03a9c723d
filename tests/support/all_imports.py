"""Imports the package and ``LIBRARIES`` when it is imported: what ``forked_python.py`` imports before it forks."""

import contextlib
import pkgutil
from importlib import import_module

import tplr

LIBRARIES = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "bittensor",
    "cbor2",
    "h5py",
    "hypothesis.strategies",
    "moto.server",
    "nbclient",
    "pandas",
    "prometheus_client",
    "scipy.stats",
    "tabulate",  # torch._dynamo imports it at each exit
    "torchdata.nodes",
)

PACKAGE = [one.name for one in pkgutil.walk_packages(tplr.__path__, "tplr.", onerror=lambda _: None)]
for name in [*PACKAGE, *LIBRARIES]:
    if not name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            import_module(name)
