"""Pages of a listing against a simple definition: make all entries, then cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.testing.s3server.listing import list_page

text = st.text(alphabet="ab/\U0010ffff", max_size=5)


def all_entries(keys: list[str], prefix: str, delimiter: str, after: str) -> list[str]:
    entries: list[str] = []
    for key in keys:
        if key > after and key.startswith(prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            entry = key if cut < 0 else key[: cut + len(delimiter)]
            if entry not in entries:
                entries.append(entry)
    return entries


@settings(max_examples=200)
@given(
    keys=st.sets(text, max_size=12).map(sorted),
    prefix=text,
    delimiter=st.sampled_from(["", "/", "b", "a/"]),
    after=text,
    limit=st.integers(1, 4),
)
def test_pages_together_are_the_whole_listing(
    keys: list[str], prefix: str, delimiter: str, after: str, limit: int
) -> None:
    found: list[str] = []
    resume: str | None = after
    while resume is not None:
        page = list_page(keys, prefix=prefix, delimiter=delimiter, after=resume, limit=limit)
        assert len(page.keys) + len(page.prefixes) <= limit
        assert len(page.keys) + len(page.prefixes) == limit or page.resume is None
        found += sorted((*page.keys, *page.prefixes))
        resume = page.resume
    # Within a page keys and groups are two lists, so only their order within a page is lost.
    assert found == sorted(all_entries(keys, prefix, delimiter, after))


def test_a_page_of_nothing_ends_the_listing() -> None:
    assert list_page(["a"], prefix="", delimiter="", after="", limit=0).resume is None
