"""``StoreFactory`` creates a store by the name of its format."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from tplr.stores.base import TokenStore
from tplr.stores.h5 import H5Store
from tplr.stores.jsonl import JsonlStore
from tplr.stores.mmap import MmapStore

S = TypeVar("S", bound=type[TokenStore])


class StoreFactory:
    """Creates stores: ``StoreFactory.create("bin").load("tokens/")``. ``register`` adds formats."""

    _kinds: ClassVar[dict[str, type[TokenStore]]] = {"h5": H5Store, "bin": MmapStore, "jsonl": JsonlStore}

    @classmethod
    def create(cls, name: str, **options: Any) -> TokenStore:
        """A new store. Options that the format does not have are ignored, so that one call serves all formats.

        Raises:
            ValueError: no such format.
        """
        kind = cls._kinds.get(name)
        if kind is None:
            raise ValueError(f"Unknown component {name!r}: expected one of {', '.join(cls._kinds)}")
        known = inspect.signature(kind).parameters
        return kind(**{option: value for option, value in options.items() if option in known})

    @classmethod
    def register(cls, name: str) -> Callable[[S], S]:
        """Class decorator that adds a format.

        Raises:
            TypeError: the class is no ``TokenStore``.
            ValueError: the name is taken.
        """

        def add(kind: S) -> S:
            if not issubclass(kind, TokenStore):
                raise TypeError(f"{kind.__name__} is not a TokenStore: derive it from tplr.stores.base.TokenStore")
            if name in cls._kinds:
                raise ValueError(f"store format {name!r} is taken by {cls._kinds[name].__name__}")
            cls._kinds[name] = kind
            return kind

        return add
