"""Documents about a run and its nodes: start, peer lists, reports and software."""

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from tplr.schemas.wire import Document, Items, ReasonText, Sha256, Uid, UidText, Window


class StartWindow(Document):
    """``start_window_v{version}.json``: the first window of the run."""

    kind: ClassVar[str] = "start-window"

    start_window: Window


class PeerList(Document):
    """``peers_{first_effective_window}_v{version}.json``: the uids whose updates are gathered from that window on.

    Each of ``peers`` without a valid update is replaced by the next of ``reserve_peers`` with one. Updates of uids on
    ``probation`` are measured, but not applied.
    """

    kind: ClassVar[str] = "peers"

    peers: Items[Uid] = Field(max_length=4096)
    reserve_peers: Items[Uid] = Field(default=(), max_length=4096)
    probation: Items[Uid] = Field(default=(), max_length=4096)
    initial_selection: bool
    sync_window: Window
    first_effective_window: Window


class Software(Document):
    """``software-{uid}.json``: a node's software versions, written at its start.

    Attributes:
        package: version of this package, with its pre-release, if it is one: 1.0.1, 1.0rc1, 1.0.dev3.
        spec_version: newest version of the run's rules that the node knows.
        since: first window under these rules; 0 if the run began with them.
    """

    kind: ClassVar[str] = "software"
    max_bytes: ClassVar[int] = 2**10

    uid: Uid
    package: Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){1,3}((a|b|rc)[0-9]{1,9})?(\.dev[0-9]{1,9})?$")]
    spec_version: Annotated[int, Field(ge=0, lt=2**31)]
    since: Window


class DebugReport(Document):
    """``debug-{window}-{uid}-v{version}.json``: a node's report after it applied a window.

    Attributes:
        fingerprint: hash of entries at positions that are unpredictable before the window ends.
        outer_fingerprint: hash of the outer scheme's state that is equal on all nodes: norm caps and outer momentum; in
            a report with a digest, of all its entries.
        proof: hash of entries at positions specific to this uid, so that other uids can't copy it.
        digest: hash of the whole model, at intervals and before each checkpoint; empty in other windows.
        included: SHA-256 of each applied update, by uid.
        skipped: reason for each other peer, by uid.
    """

    kind: ClassVar[str] = "debug"

    window: Window
    uid: Uid
    fingerprint: Sha256
    outer_fingerprint: Sha256
    proof: Sha256
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    included: Annotated[dict[UidText, Sha256], FailFast()] = Field(max_length=4096)
    skipped: Annotated[dict[UidText, ReasonText], FailFast()] = Field(max_length=4096)
