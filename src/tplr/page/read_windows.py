"""Selects the windows of a run that a reader that follows it reads again."""

from collections.abc import Container, Iterable, Mapping

from tplr.page.history import WindowRecord


class ReadWindows:
    """Remembers what was read of each window.

    Nodes may publish the reports of a window some windows later, so the newest ones are always read again. Older ones
    are read again if the last read had no answer. If they have no scores, they are also read again when the validator's
    bucket lists a score report that was not read yet.
    """

    def __init__(self, unsettled: int) -> None:
        """``unsettled``: number of windows that are always read again."""
        self._unsettled = unsettled
        self._read: dict[tuple[int | None, int], str] = {}  # by validator and window: ETag of the score report
        self._unanswered: set[int] = set()

    def wanted(
        self,
        windows: Iterable[int],
        known: Mapping[int, WindowRecord],
        *,
        validator: int | None,
        scored: Mapping[int, str],
    ) -> list[int]:
        """Return the windows to read, ascending.

        Args:
            known: what was read of earlier windows.
            scored: ETags of the score reports in the bucket of ``validator``, by window.
        """
        found = sorted(windows)
        unsettled = {*found[-self._unsettled :], *self._unanswered}

        def changed(window: int) -> bool:
            return bool(known[window].unread) and scored.get(window) != self._read.get((validator, window))

        return [one for one in found if one in unsettled or one not in known or changed(one)]

    def note(
        self, read: Iterable[int], *, unanswered: Container[int], validator: int | None, scored: Mapping[int, str]
    ) -> None:
        """Remember that these windows were read; ``unanswered``: those of which something did not answer."""
        read = list(read)
        self._unanswered = {one for one in self._unanswered if one not in read} | {
            one for one in read if one in unanswered
        }
        self._read |= {(validator, one): scored[one] for one in read if one in scored and one not in self._unanswered}
