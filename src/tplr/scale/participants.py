"""Random participants of a simulated network: links, stores, GPUs and presence, drawn from stated distributions.

All spreads are those of log-normal numbers (``draws.log_normal``): with a spread of 0.3, 95 % are within a factor of
1.8 of the median.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tplr.scale.draws import log_normal, stream
from tplr.scale.links import connection_rate


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumed values that are not measured. The defaults are the design case of docs/scale.md.

    Attributes:
        down, up: medians of the miners' links, bits per second.
        validator_down, validator_up: the same for validators.
        link_spread, hour_spread: spread of link rates among participants, and from window to window.
        latency, loss: medians of the round-trip time to the stores (seconds) and of the share of lost packets. They
            limit one connection (``links.connection_rate``).
        parallel: number of connections of one transfer.
        request, request_spread: median seconds of a request to a store without the latency, and its spread.
        tail: share of requests that take ``tail_seconds`` longer.
        cores: processors that all nodes and stores share (``load.py``); infinite: each has its own.
        request_work: seconds of processor time of a request, of the node and the store together.
        measuring_work: seconds of processor time of a validator's measurements, which begin at the window's end.
        outages: probability that a bucket has an outage in a window, and mean seconds of an outage. During an outage,
            requests fail and are retried.
        regional: the same for an outage of all buckets at once.
        crash: share of participants that crash in a window; they are away for ``away`` windows (mean, exponential).
        churn: share of unlisted miners whose uid changes hands in a window. The chain reassigns the uids that earn
            least.
        dead: share of uids whose bucket never answers.
        silent: share of electors that take no part in a window's election.
        final_blocks: blocks until a window's first block is final. No node gathers earlier, because that block
            determines the upload bounds.
        gpu_spread: spread of GPU speeds.
        training: seconds that the median miner needs for all batches of a window; infinite: batches never run out.
        pack, apply, save: seconds of the median participant, divided by its GPU's speed; a save writes the whole state.
        quality: spread of the miners' merit.
        bad: share of miners that never earn a place.
    """

    down: float = 500e6
    up: float = 110e6
    validator_down: float = 500e6
    validator_up: float = 110e6
    link_spread: float = 0.3
    hour_spread: float = 0.1
    latency: float = 0.03
    loss: float = 1e-6
    parallel: int = 1
    request: float = 0.08
    request_spread: float = 0.5
    tail: float = 0.01
    tail_seconds: float = 2.0
    cores: float = float("inf")
    request_work: float = 0.0
    measuring_work: float = 0.0
    outages: tuple[float, float] = (0.0005, 60.0)
    regional: tuple[float, float] = (0.0005, 300.0)
    crash: float = 0.0005
    away: float = 3.0
    churn: float = 0.001
    dead: float = 0.02
    silent: float = 0.001
    final_blocks: int = 2
    gpu_spread: float = 0.15
    training: float = float("inf")
    pack: float = 2.0
    apply: float = 2.0
    save: float = 0.0
    quality: float = 0.5
    bad: float = 0.2


@dataclass(frozen=True)
class Participants:
    """One value for each uid; validators come first.

    Attributes:
        down, up: bytes per second.
        download_connection, upload_connection: limit of all connections of one transfer, bytes per second.
        speed: GPU speed relative to the median.
        merit: a miner's merit; 0: it never earns a place.
        dead: whether its bucket never answers.
    """

    validators: int
    down: np.ndarray
    up: np.ndarray
    download_connection: np.ndarray
    upload_connection: np.ndarray
    speed: np.ndarray
    merit: np.ndarray
    dead: np.ndarray

    @property
    def uids(self) -> int:
        """Number of uids."""
        return len(self.up)

    @classmethod
    def draw(cls, assumed: Assumptions, *, uids: int, validators: int, seed: int) -> Participants:
        """Draw all participants of a simulation from the streams of ``seed``."""

        def spread(name: str, median: float, width: float) -> np.ndarray:
            return log_normal(stream(seed, name), median, width, uids)

        connection = np.array(
            [
                assumed.parallel * connection_rate(latency, loss)
                for latency, loss in zip(
                    spread("latency", assumed.latency, assumed.link_spread),
                    spread("loss", assumed.loss, assumed.link_spread),
                    strict=True,
                )
            ]
        )
        rng = stream(seed, "uids")
        bad, dead = rng.random(uids) < assumed.bad, rng.random(uids) < assumed.dead
        voting = np.arange(uids) < validators
        dead[voting] = False
        return cls(
            validators=validators,
            down=spread("down", 1.0, assumed.link_spread) * np.where(voting, assumed.validator_down, assumed.down) / 8,
            up=spread("up", 1.0, assumed.link_spread) * np.where(voting, assumed.validator_up, assumed.up) / 8,
            download_connection=connection,
            upload_connection=connection,
            speed=spread("speed", 1.0, assumed.gpu_spread),
            merit=np.where(bad, 0.0, spread("merit", 1.0, assumed.quality)),
            dead=dead,
        )


class Requests:
    """Draws request times of stores and outages of buckets."""

    def __init__(self, assumed: Assumptions, seed: int) -> None:
        self._assumed = assumed
        self._seed = seed

    def seconds(self, purpose: str, window: int, size: int | tuple[int, ...]) -> np.ndarray:
        """Draw the seconds that requests take, float64 of shape ``size``."""
        one, rng = self._assumed, stream(self._seed, "requests", purpose, window)
        count = int(np.prod(size))
        found = one.latency + log_normal(rng, one.request, one.request_spread, count)
        found += np.where(rng.random(count) < one.tail, one.tail_seconds, 0.0)
        return found.reshape(size)

    def outages(self, window: int, uids: int, window_seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """Draw begin and end of each bucket's outage in a window, in seconds since its begin; equal: no outage."""
        rng = stream(self._seed, "outages", window)
        begins = rng.random(uids) * window_seconds
        lasts = np.where(
            rng.random(uids) < self._assumed.outages[0], rng.exponential(self._assumed.outages[1], uids), 0.0
        )
        share, mean = self._assumed.regional
        if rng.random() < share:
            begins[:], lasts[:] = rng.random() * window_seconds, rng.exponential(mean)
        return begins, begins + lasts
