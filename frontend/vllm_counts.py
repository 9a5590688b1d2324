# SPDX-License-Identifier: Apache-2.0
"""What the front of a role with vLLM counts, beside all that vLLM and the connector count themselves."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrail.frontend.vllm_link import VllmLink

__all__ = ["ProxyCounts"]

_APIS = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}


class ProxyCounts:
    """The counters of one front process, in a registry of their own."""

    def __init__(self, link: VllmLink) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvrail_requests", "requests that have ended", ["api", "route", "outcome"], registry=self.registry
        )
        self.open = Gauge("kvrail_front_open", "requests that have not ended", registry=self.registry)
        self.registry.register(_Connector(link))

    def ended(self, path: str, route: str, outcome: str) -> None:
        """Count a request."""
        self.requests.labels(_APIS.get(path, "other"), route, outcome).inc()


class _Connector(Collector):
    """What the connector and the server said last, under the names that the embedded engine has for the same."""

    def __init__(self, link: VllmLink) -> None:
        self._link = link

    def describe(self) -> Iterator[Metric]:
        """Nothing is known yet; this keeps registration from collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        state, connector = self._link.state, self._link.connector()
        ready = GaugeMetricFamily("kvrail_rank_ready", "see doc/metrics.md", labels=["rank"])
        ready.add_metric(["0"], float(state is not None))
        requests = GaugeMetricFamily("kvrail_rank_requests", "see doc/metrics.md", labels=["rank"])
        requests.add_metric(["0"], float(state.requests if state is not None else 0))
        yield ready
        yield requests
        for name, value in sorted(connector.get("gauges", {}).items()):
            yield GaugeMetricFamily(f"kvrail_{name}", "see doc/metrics.md", value=value)
        for name, value in sorted(connector.get("counters", {}).items()):
            yield CounterMetricFamily(f"kvrail_{name}", "see doc/metrics.md", value=value)
        labels = ["rank", "peer", "lane", "transport"]
        up = GaugeMetricFamily("kvrail_link_up", "see doc/metrics.md", labels=labels)
        sent = CounterMetricFamily("kvrail_link_bytes", "see doc/metrics.md", labels=labels)
        for one in connector.get("links", ()):
            named = [str(one.get("rank", 0)), f"{one.get('peer', '')}/{one.get('peer_rank', 0)}"]
            named += [str(one.get("lane") or ""), str(one.get("transport") or "")]
            up.add_metric(named, float(one.get("state") == "up"))
            sent.add_metric(named, float((one.get("counters") or {}).get("bytes", 0.0)))
        yield up
        yield sent
