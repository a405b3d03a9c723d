"""from_mosaicml: samples of a StreamingDataset of mosaicml-streaming, resumed by its own state."""

import warnings
from collections.abc import Iterator
from typing import Any

from tplr.errors import DataError, StateError
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.state import StateReader


class FromMosaicML(Transform):
    """Samples of a StreamingDataset in its order. It supports one iterator at a time: a second one disturbs the first.

    It ignores a state after its first iteration, so a resume needs a new StreamingDataset.
    """

    divisible = False  # a StreamingDataset divides its samples between ranks itself

    def __init__(self, dataset: Any, repeat: bool) -> None:
        missing = [name for name in ("state_dict", "load_state_dict", "__iter__") if not hasattr(dataset, name)]
        if missing:
            raise ValueError(f"from_mosaicml: expected a StreamingDataset, {type(dataset).__name__} lacks {missing}")
        self.dataset, self.repeat = dataset, repeat
        self.passes = 0

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        if self.passes:
            if state is not None:
                raise StateError("from_mosaicml: the dataset was iterated over before; resume with a new one")
            warnings.warn("from_mosaicml: a StreamingDataset supports one iterator at a time", stacklevel=4)
        self.passes += 1
        return _MosaicMLIterator(self, self.reader(state))

    def describe(self, *, pinned: bool) -> str:
        return f"from_mosaicml({'repeat' if self.repeat else ''})"


class _MosaicMLIterator(StreamIterator[Any]):
    def __init__(self, transform: FromMosaicML, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._index = saved.integer("index") if saved else 0  # samples of this epoch
        self._ended = saved.flag("ended") if saved else False
        self._saved: dict[str, Any] | None = saved.child("dataset") if saved else None
        if self._saved is not None and not self._ended:
            transform.dataset.load_state_dict(dict(self._saved))
        self._items: Iterator[Any] | None = None
        self._failed = False  # it raised an error, which ends its generator

    def __next__(self) -> Any:
        while not self._ended:
            if self._items is None:
                self._items = iter(self._transform.dataset)
            try:
                item = next(self._items)
            except StopIteration:
                if self._failed:
                    raise DataError(
                        f"from_mosaicml: an error after sample {self._index} ended this iterator; resume from the "
                        f"state with a new StreamingDataset"
                    ) from None
                self._ended = not self._transform.repeat or not self._index
                self._items, self._index = None, 0
                continue
            except BaseException:
                self._failed = True
                raise
            self._index, self._failed = self._index + 1, False
            return item
        raise StopIteration

    def state(self) -> State:
        if self._items is None and self._saved is not None:
            dataset = self._saved
        else:
            dataset = self._transform.dataset.state_dict(self._index, from_beginning=True)
        return {"index": self._index, "ended": self._ended, "dataset": dataset}
