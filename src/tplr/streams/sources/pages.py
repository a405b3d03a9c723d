"""from_pages: rows of the pages that a seed draws from the dataset bucket."""

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from tplr.concurrency.read_ahead import ReadAhead
from tplr.config import BucketLocation
from tplr.errors import StateError
from tplr.pages.manifest import DatasetManifest
from tplr.pages.page_draw import next_pages
from tplr.pages.reader import PageReader
from tplr.schemas import PageRef
from tplr.sharding import Share
from tplr.storage.blocking import BucketConnections
from tplr.streams.iterator import Part, PipelineContext, State, StreamIterator, Transform, divided_items
from tplr.streams.order import Order
from tplr.streams.shared_places import Former, SharedPlaces, divide_places
from tplr.streams.state import StateReader

_AHEAD = 3  # pages that are fetched while another one is in use


def page_order(
    manifest: DatasetManifest, seed: int | str, offset: int, n_pages: int, rows_per_page: int
) -> Order[PageRef]:
    """Return the pages of a draw as an ``Order``, which can be shared, mixed and taken from.

    Raises DataError as ``next_pages``.
    """
    pages = next_pages(
        manifest.configs.values(), offset=offset, n_pages=n_pages, seed=seed, rows_per_page=rows_per_page
    )
    return Order.of(pages, f"pages({seed!r}, {offset}, {rows_per_page} rows, {manifest.sha256})")


class FromPages(Transform):
    """Rows ``{"text", "page"}`` of ``n_pages`` seeded pages, in order; ``page`` is ``config_row_split``.

    Pages are read from all replicas of the environment's dataset bucket, each by a few bounded requests. A state is a
    page, a row in it, and the manifest's hash; a dataset that has changed since is refused.
    """

    def __init__(self, seed: int | str, n_pages: int, offset: int, rows_per_page: int, subfolder: str | None) -> None:
        if n_pages < 0 or offset < 0 or rows_per_page < 1:
            raise ValueError(f"from_pages: arguments out of range: {n_pages=}, {offset=}, {rows_per_page=}")
        self.seed, self.n_pages, self.offset = seed, n_pages, offset
        self.rows_per_page, self.subfolder = rows_per_page, subfolder

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _PagesIterator(self, context, self.reader(state))

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """See ``Transform``. Open pages go to the new shares with their rows, the others as at the beginning."""
        begun = [(part, self.reader(part.state)) for part in parts]
        former = [
            Former(part.share, StateReader(one.stage, one.child("places")) if one else None, part.ended)
            for part, one in begun
        ]
        saved = [one for _, one in begun if one]
        return {
            "places": divide_places(former, self.n_pages, share),
            "open": divided_items(saved, "open", share),
            "manifest": max((one.text("manifest") for one in saved), default=""),
        }

    def describe(self, *, pinned: bool) -> str:
        return f"from_pages({self.seed!r}, {self.offset}, {self.n_pages} of {self.rows_per_page} rows)"


class _PagesIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: FromPages, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        places = StateReader(saved.stage, saved.child("places")) if saved else None
        self._places = SharedPlaces(transform.n_pages, context.share or Share(0, 1), False, "pages", places)
        self._open: deque[tuple[int, int]] = deque()  # page in use, and its next row; of a state also further ones
        self._sha256 = ""
        if saved:
            self._sha256 = saved.text("manifest")
            for item in saved.items("open", kind=list):
                if len(item) != 2:
                    raise saved.wrong("open", "lists of page and row", item)
                page = saved.integer_of(item[0], "open", high=transform.n_pages - 1)
                self._open.append((page, saved.integer_of(item[1], "open", high=transform.rows_per_page)))
        self._book: tuple[Order[PageRef], PageReader] | None = None
        self._texts: list[str] | None = None  # of the page in use
        self._ahead: ReadAhead[int, Any] | None = None

    def __next__(self) -> dict[str, Any]:
        while self._open or self._next_page():
            order, reader = self._opened()
            if self._texts is None:
                self._texts = self._load(order, reader)
            page, row = self._open[0]
            if row < len(self._texts):
                config, first, split = order[page]
                self._open[0] = page, row + 1
                return {"text": self._texts[row], "page": f"{config}_{first}_{split}"}
            self._open.popleft()
            self._texts = None
        raise StopIteration

    def state(self) -> State:
        return {"places": self._places.state(), "open": [[*one] for one in self._open], "manifest": self._sha256}

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _next_page(self) -> bool:
        while True:
            for page in self._places.run:
                self._open.append((page, 0))
                return True
            if not self._places.advance():
                return False
            self.close()  # it does not know the pages of the new run

    def _load(self, order: Order[PageRef], reader: PageReader) -> list[str]:
        """Return the texts of the current page; after an error the next call fetches it again."""
        if self._ahead is None:
            stores = self._context.shared(BucketConnections)
            pages = chain([page for page, _ in self._open], self._places.left())
            self._ahead = ReadAhead(pages, lambda page: stores.submit(reader.texts(order[page])), _AHEAD + 1)
        try:
            return list(next(self._ahead)[1].result())
        except BaseException:
            self.close()
            raise

    def _opened(self) -> tuple[Order[PageRef], PageReader]:
        if self._book is None:
            stores, transform = self._context.shared(BucketConnections), self._transform

            async def opened() -> PageReader:
                dataset = stores.environment.dataset(subfolder=transform.subfolder)
                located = [
                    BucketLocation(bucket, stores.environment.endpoint, stores.environment.region)
                    for bucket in dataset.replicas
                ]
                return await PageReader.open(
                    [await stores.connect(one) for one in located],
                    dataset.subfolder,
                    rows_per_page=transform.rows_per_page,
                    concurrency=_AHEAD + 1,
                )

            reader = stores.submit(opened()).result()
            manifest = reader.manifest
            if self._sha256 and self._sha256 != manifest.sha256:
                raise StateError(
                    f"from_pages: the state was saved with the dataset's manifest {self._sha256}, "
                    f"the bucket's is {manifest.sha256}: its pages differ"
                )
            self._sha256 = manifest.sha256
            self._book = (
                page_order(manifest, transform.seed, transform.offset, transform.n_pages, transform.rows_per_page),
                reader,
            )
        return self._book
