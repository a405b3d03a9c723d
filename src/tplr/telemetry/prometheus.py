"""Serves a node's metrics to Prometheus over HTTP; needs the extra ``metrics``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

from tplr.errors import ConfigError
from tplr.telemetry.events import Event
from tplr.telemetry.metrics import METRICS, NO_LABEL, Metric

if TYPE_CHECKING:
    from prometheus_client import Metric as Family


class PrometheusListener:
    """Serves ``METRICS`` at ``http://{address}:{port}/metrics``, from a separate thread, until the block ends.

    The client library adds memory, CPU and descriptors of the process; ``tplr_info`` has role, uid and version. Before
    its first event, and after one without its value, a gauge has no series; a counter is 0 for every known label value.

    Attributes:
        port: the given port, or the free port that was chosen.
    """

    def __init__(self, port: int, *, address: str) -> None:
        """``port`` 0 selects a free port. Raises ConfigError if the extra is missing, or the port can't be used."""
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        except ImportError as error:
            raise ConfigError("--metrics-port needs the extra: .venv/bin/pip install -e '.[metrics]'") from error
        self._lock = threading.Lock()  # events are emitted in the node's thread, requests are served in another
        self._info: dict[str, str] = {}
        self._values: dict[str, dict[str, float]] = {
            metric.name: dict.fromkeys(metric.from_start, 0.0) for metric in METRICS
        }
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"--metrics-port {port} on {address}: {reason}; give another port, or 0 for any free one"
            ) from error
        self.port: int = self._server.server_port

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event["event"] == "started":
                self._info = {name: str(event[name]) for name in ("role", "uid", "version")}
            for metric in METRICS:
                if metric.event == event["event"]:
                    self._record(metric, event)

    def _record(self, metric: Metric, event: Event) -> None:
        reading = metric.read(event)
        values = self._values[metric.name]
        if metric.replaces or (reading is None and metric.kind == "gauge"):
            values.clear()
        if reading is None:
            return
        for label, number in (reading if isinstance(reading, Mapping) else {NO_LABEL: reading}).items():
            if number is not None:
                values[label] = number + (values.get(label, 0.0) if metric.kind == "counter" else 0.0)

    def collect(self) -> Iterator[Family]:
        """Yield the current series for the client library."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            info = dict(self._info)
        if info:
            about = GaugeMetricFamily("tplr_info", "1; its labels name this node.", labels=list(info))
            about.add_metric(list(info.values()), 1.0)
            yield about
        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.name, metric.help, labels=[metric.label] if metric.label else [])
            for label, number in values[metric.name].items():
                family.add_metric([label] if metric.label else [], number)
            yield family

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
