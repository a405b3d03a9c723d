"""Training items from a token store: windows of a stream (seq, sft) and whole records (dpo, grpo).

=====  ==========================================  ===========================================================
type   keys of the store                           an item
=====  ==========================================  ===========================================================
seq    sequence                                    input_ids, target_ids: int64 (window)
sft    sequence, loss_mask, position_ids           the same, position_ids int64, loss_mask bool, of the targets
dpo    chosen, chosen_mask, rejected, rejected_mask  the same: int64, masks bool
grpo   prompts, responses, masks, rewards          the same: int64 (prompt), G of int64 and bool, floats (G)
=====  ==========================================  ===========================================================

Targets are the inputs shifted by one token. All items of seq and sft have the same shape, so any collation works; for
the others pass ``collate_fn=dataset.collate`` to the loader.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from tplr.errors import DataError
from tplr.stores.base import TokenStore
from tplr.stores.collate import collate_grpo, collate_pairs
from tplr.stores.detect import detect_format
from tplr.stores.factory import StoreFactory
from tplr.stores.prepared import check_prepared
from tplr.stores.token_stream import mask, token_ids

RAW_CONFIG = "dataset_config.json"  # in the folder of raw JSON Lines: how to tokenize them

Item = dict[str, Any]


class BaseDataset(Dataset[Item]):
    """Items of a loaded store.

    Raises:
        KeyError: the store lacks a key that this type needs.
        DataError: an item holds a token or position that is not a whole number, or a mask that is neither 0 nor 1.
    """

    required_keys: ClassVar[tuple[str, ...]]

    def __init__(self, store: TokenStore) -> None:
        missing = [key for key in self.required_keys if key not in store.keys]
        if missing:
            raise KeyError(
                f"the store lacks {', '.join(missing)}: {type(self).__name__} requires "
                f"{', '.join(self.required_keys)}; available: {', '.join(store.keys)}"
            )
        self.store = store

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Item: ...

    def collate(self, items: Sequence[Item]) -> Item:
        """One batch of some items."""
        return default_collate([*items])

    def _checked(self, index: int, length: int) -> int:
        if not -length <= index < length:
            raise IndexError(f"item {index} of {length}")
        return index % length


class WindowDataset(BaseDataset):
    """Windows of ``window_size`` tokens, one every ``stride``; each needs the token after it as its last target.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, store: TokenStore, window_size: int, stride: int | None = None) -> None:
        super().__init__(store)
        self.window_size = window_size
        self.stride = window_size if stride is None else stride
        if window_size < 1 or self.stride < 1:
            raise ValueError(f"window_size {window_size}, stride {self.stride}: expected at least 1")
        self._length = window_count(len(store), window_size, self.stride)
        # Looked up once, because an item takes only microseconds.
        self._tokens = store.stream("sequence")

    def __len__(self) -> int:
        return self._length

    def get_index(self, index: int) -> tuple[int, int]:
        """Start and end of window ``index`` in the stream; negative numbers count from the end.

        Raises:
            IndexError: there is no such window.
        """
        begin = self._checked(index, self._length) * self.stride
        return begin, begin + self.window_size


class SeqDataset(WindowDataset):
    """Next-token prediction. The two tensors of an item share memory; those of a batch do not."""

    required_keys = ("sequence",)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self._length:
            index = self._checked(index, self._length)
        begin = index * self.stride
        tokens = token_ids(self._tokens.read(begin, begin + self.window_size + 1), "sequence", index)
        return {"input_ids": torch.from_numpy(tokens[:-1]), "target_ids": torch.from_numpy(tokens[1:])}


class SftDataset(WindowDataset):
    """Next-token prediction of the tokens that ``loss_mask`` marks; it is shifted like the targets."""

    required_keys = ("sequence", "loss_mask", "position_ids")

    def __getitem__(self, index: int) -> Item:
        begin, end = self.get_index(index)
        tokens = token_ids(self._tokens.read(begin, end + 1), "sequence", index)
        return {
            "input_ids": torch.from_numpy(tokens[:-1]),
            "target_ids": torch.from_numpy(tokens[1:]),
            "loss_mask": _mask(self.store.fetch(begin + 1, end + 1, "loss_mask"), "loss_mask", index),
            "position_ids": _token_ids(self.store.fetch(begin, end, "position_ids"), "position_ids", index),
        }


class RecordDataset(BaseDataset):
    """Whole records.

    Raises:
        DataError: the store has no record positions.
    """

    def __init__(self, store: TokenStore) -> None:
        super().__init__(store)
        self._length = store.num_records
        if not self._length and len(store):
            raise DataError(
                f"{type(self).__name__} reads record by record, and this store has no record offsets: prepare it again"
            )

    def __len__(self) -> int:
        return self._length

    def _record(self, index: int) -> dict[str, Any]:
        return self.store.fetch_record(self._checked(index, self._length), self.required_keys)

    def _check_equal(self, index: int, record: dict[str, Any], *pairs: tuple[str, str]) -> None:
        for one, other in pairs:
            sizes = [[len(part) for part in _parts(record[key])] for key in (one, other)]
            if sizes[0] != sizes[1]:
                raise DataError(f"record {index}: {one} has lengths {sizes[0]}, {other} {sizes[1]}: they must agree")


class DpoDataset(RecordDataset):
    """Preference pairs."""

    required_keys = ("chosen", "chosen_mask", "rejected", "rejected_mask")

    def __getitem__(self, index: int) -> Item:
        record = self._record(index)
        self._check_equal(index, record, ("chosen", "chosen_mask"), ("rejected", "rejected_mask"))
        masks = {key: _mask(record[key], key, index) for key in ("chosen_mask", "rejected_mask")}
        return {key: _token_ids(record[key], key, index) for key in ("chosen", "rejected")} | masks

    def collate(self, items: Sequence[Item]) -> Item:
        """int64 and bool (B, T); zeros up to the longest of both sides."""
        return collate_pairs(items)


class GrpoDataset(RecordDataset):
    """Prompts with a group of responses each, and a reward for every response."""

    required_keys = ("prompts", "responses", "masks", "rewards")

    def __getitem__(self, index: int) -> Item:
        record = self._record(index)
        self._check_equal(index, record, ("responses", "masks"))
        rewards, group = record["rewards"], _parts(record["responses"])
        if len(rewards) != len(group):
            raise DataError(f"record {index}: {len(group)} responses, {len(rewards)} rewards: they must agree")
        return {
            "prompts": _token_ids(record["prompts"], "prompts", index),
            "responses": [_token_ids(part, "responses", index) for part in group],
            "masks": [_mask(part, "masks", index) for part in _parts(record["masks"])],
            "rewards": rewards.clone() if rewards.is_floating_point() else rewards.float(),
        }

    def collate(self, items: Sequence[Item]) -> Item:
        """prompts (B, P), padded left, and prompts_mask; responses and masks (B, G, R), padded right; rewards
        (B, G). All records have G responses."""
        return collate_grpo(items)


class DatasetFactory:
    """Creates a dataset by the name of its train type."""

    kinds: ClassVar[dict[str, type[BaseDataset]]] = {
        "seq": SeqDataset,
        "sft": SftDataset,
        "dpo": DpoDataset,
        "grpo": GrpoDataset,
    }

    @classmethod
    def load(
        cls,
        train_type: str,
        load_path: str | Path | None,
        window_size: int,
        stride: int | None = None,
        storage_type: str | None = None,
        *,
        tokenizer_path: str | Path | None = None,
        max_len: int = 2048,
        store: TokenStore | None = None,
        allow_incomplete: bool = False,
    ) -> BaseDataset:
        """Open a store as a dataset of ``train_type``.

        Args:
            load_path: a file, a folder, or ``s3://bucket/prefix`` (see ``bucket_reader.BucketReader``, whose
                connections then stay open while the program runs).
            window_size, stride: of windows, in tokens; records of dpo and grpo are taken whole.
            storage_type: h5, bin or jsonl; default: detected.
            tokenizer_path: for raw JSON lines (messages, or the fields of dpo and grpo), which are then tokenized
                while loading, by the ``dataset_config.json`` beside them or the default for ``train_type``.
            max_len: longest sequence of raw records, in tokens.
            store: a loaded store; ``load_path`` and the arguments about it are ignored.
            allow_incomplete: open the existing shards of a local preparation that is not finished or lacks shards.

        Raises:
            DataError, FileNotFoundError, KeyError, ValueError: as ``StoreFactory``, ``TokenStore.load``, the dataset.
        """
        kind = cls.kinds.get(train_type)
        if kind is None:
            raise ValueError(f"train_type {train_type!r}: expected one of {', '.join(cls.kinds)}")
        if store is None:
            if load_path is None:
                raise ValueError("load_path: expected a file or folder, or a loaded store")
            store = _opened(
                train_type, load_path, storage_type, tokenizer_path, max_len, allow_incomplete=allow_incomplete
            )
        return kind(store, window_size, stride) if issubclass(kind, WindowDataset) else kind(store)


def _opened(
    train_type: str,
    load_path: str | Path,
    storage_type: str | None,
    tokenizer_path: str | Path | None,
    max_len: int,
    *,
    allow_incomplete: bool,
) -> TokenStore:
    """The loaded store at ``load_path``. Raw JSON Lines are tokenized if there is a tokenizer or a config."""
    if str(load_path).startswith("s3://"):
        from tplr.stores.bucket_reader import BucketReader

        return BucketReader(str(load_path)).open()
    path = Path(load_path)
    if not allow_incomplete:
        check_prepared(path)
    storage_type = storage_type or detect_format(path)
    config = (path if path.is_dir() else path.parent) / RAW_CONFIG
    transform = None
    if storage_type == "jsonl" and (tokenizer_path or config.exists()):
        from tplr.stores.preprocess.raw import raw_transform

        transform = raw_transform(train_type, config, tokenizer_path, max_len)
    store = StoreFactory.create(storage_type, transform=transform)
    store.load(path, allow_incomplete=True)  # it is checked already
    return store


def window_count(tokens: int, window_size: int, stride: int) -> int:
    """Number of windows that have a target for each of their tokens."""
    return 0 if tokens <= window_size else (tokens - 1 - window_size) // stride + 1


def _token_ids(values: Tensor, key: str, item: int) -> Tensor:
    return torch.from_numpy(token_ids(values.numpy(), key, item))


def _mask(values: Tensor, key: str, item: int) -> Tensor:
    return torch.from_numpy(mask(values.numpy(), key, item))


def _parts(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [value]
