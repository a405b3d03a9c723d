"""from_pages: rows of the pages that a seed draws from the dataset bucket."""

from typing import Any

from tplr.concurrency.read_ahead import ReadAhead
from tplr.config import BucketLocation
from tplr.errors import StateError
from tplr.pages.manifest import DatasetManifest
from tplr.pages.page_draw import next_pages
from tplr.pages.reader import PageReader
from tplr.schemas import PageRef
from tplr.storage.blocking import BucketConnections
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.order import Order

_AHEAD = 3  # pages that are fetched while one is in use


def page_order(
    manifest: DatasetManifest, seed: int | str, offset: int, n_pages: int, rows_per_page: int
) -> Order[PageRef]:
    """The pages of a draw as an order: to be shared between ranks, mixed, taken. Raises DataError as ``next_pages``."""
    pages = next_pages(
        manifest.configs.values(), offset=offset, n_pages=n_pages, seed=seed, rows_per_page=rows_per_page
    )
    return Order.of(pages, f"pages({seed!r}, {offset}, {rows_per_page} rows, {manifest.sha256})")


class FromPages(Transform):
    """Rows ``{"text", "page"}`` of ``n_pages`` seeded pages, in order; ``page`` is ``config_row_split``.

    Read from all replicas of the dataset bucket that the environment tells of, each page by a few bounded requests. A
    state is a page and a row of it, and the manifest's hash: a dataset that has changed since is refused.
    """

    def __init__(self, seed: int | str, n_pages: int, offset: int, rows_per_page: int, subfolder: str | None) -> None:
        if n_pages < 0 or offset < 0 or rows_per_page < 1:
            raise ValueError(f"from_pages: no such draw: {n_pages=}, {offset=}, {rows_per_page=}")
        self.seed, self.n_pages, self.offset = seed, n_pages, offset
        self.rows_per_page, self.subfolder = rows_per_page, subfolder

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _PagesIterator(self, context, state)

    def describe(self, *, pinned: bool) -> str:
        return f"from_pages({self.seed!r}, {self.offset}, {self.n_pages} of {self.rows_per_page} rows)"


class _PagesIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: FromPages, context: PipelineContext, state: State | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._page, self._row = (state["page"], state["row"]) if state else (0, 0)
        self._sha256: str = state["manifest"] if state else ""
        self._book: tuple[Order[PageRef], PageReader] | None = None
        self._texts: list[str] | None = None  # of the page in use
        self._ahead: ReadAhead[int, Any] | None = None

    def __next__(self) -> dict[str, Any]:
        while self._page < self._transform.n_pages:
            order, reader = self._opened()
            if self._texts is None:
                self._texts = self._load(order, reader)
            if self._row < len(self._texts):
                config, first, split = order[self._page]
                self._row += 1
                return {"text": self._texts[self._row - 1], "page": f"{config}_{first}_{split}"}
            self._page, self._row, self._texts = self._page + 1, 0, None
        raise StopIteration

    def state(self) -> State:
        return {"page": self._page, "row": self._row, "manifest": self._sha256}

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _load(self, order: Order[PageRef], reader: PageReader) -> list[str]:
        """The texts of the present page; after an error the next call fetches it again."""
        if self._ahead is None:
            stores = self._context.shared(BucketConnections)
            self._ahead = ReadAhead(
                range(self._page, len(order)), lambda page: stores.submit(reader.texts(order[page])), _AHEAD + 1
            )
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
                    BucketLocation(bucket, stores.environment.endpoint, stores.environment.region())
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
