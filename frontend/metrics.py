# SPDX-License-Identifier: Apache-2.0
"""What a role counts, for Prometheus: its front's own counters, and the gauges and counters of its ranks.

Every name and its meaning: doc/metrics.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrail.frontend.vllm_metrics import RequestMetrics, VllmNames
from kvrail.runtime.control.rank_client import RankClient

__all__ = ["FrontMetrics", "RankCollector"]

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_APIS = ("chat", "completions", "responses")
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class FrontMetrics:
    """The counters of one front process, in a registry of their own (nothing is global)."""

    def __init__(self, ranks: Sequence[RankClient], model: str = "") -> None:
        # Or each counter gets a second series that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(RankCollector(ranks))
        r = self.registry
        self.requests = Counter(
            "kvrail_requests", "requests that have ended", ["api", "route", "outcome"], registry=r
        )
        self.prompt_tokens = Counter(
            "kvrail_front_prompt_tokens", "prompt tokens of answered requests", registry=r
        )
        self.completion_tokens = Counter(
            "kvrail_front_completion_tokens", "tokens computed for answers", registry=r
        )
        self.first_token = Histogram(
            "kvrail_time_to_first_token_seconds",
            "from a parsed request to its first token",
            ["route"],
            buckets=_FIRST_TOKEN_S,
            registry=r,
        )
        self.between_tokens = Histogram(
            "kvrail_inter_token_seconds", "between tokens of an answer", buckets=_BETWEEN_S, registry=r
        )
        self.handover = Histogram(
            "kvrail_handover_seconds",
            "from the first token of a prompt that was prefilled elsewhere to the second",
            buckets=_BETWEEN_S,
            registry=r,
        )
        self.tokenizer_checks = Counter(
            "kvrail_tokenizer_checks",
            "texts that both tokenizers tokenised, by whether they agreed",
            ["same"],
            registry=r,
        )
        self.waiting = Gauge("kvrail_front_waiting", "requests that wait for a rank", registry=r)
        self.prefill_calls = Counter(
            "kvrail_prefill_calls",
            "calls of /prefill, made by a ce or taken by a pe",
            ["outcome"],
            registry=r,
        )
        self.whole = RequestMetrics(r, model)
        self.cached_tokens = Counter(
            "kvrail_front_cached_tokens", "prompt tokens that a prefix cache had", registry=r
        )
        self.registry.register(
            VllmNames(
                ranks,
                model,
                histograms={
                    "time_to_first_token_seconds": self.first_token,
                    "inter_token_latency_seconds": self.between_tokens,
                },
                counters={
                    "prompt_tokens": self.prompt_tokens,
                    "generation_tokens": self.completion_tokens,
                    "prefix_cache_queries": self.prompt_tokens,
                    "prefix_cache_hits": self.cached_tokens,
                },
                waiting=self.waiting,
            )
        )
        self.cancel_calls = Counter(
            "kvrail_cancel_calls", "calls of /cancel, made by a ce or taken by a pe", registry=r
        )
        # From the start, those that a healthy role counts: whoever takes differences would miss the first of each.
        for labels in itertools.product(_APIS, ("remote", "local"), ("stop", "length")):
            self.requests.labels(*labels)
        for outcome in ("accepted", "refused", "unreachable", "cancelled"):
            self.prefill_calls.labels(outcome)


class RankCollector(Collector):
    """The latest Stats of each rank under `kvrail_<name>{rank}`, those of links under `kvrail_link_<name>{…}`."""

    def __init__(self, ranks: Sequence[RankClient]) -> None:
        self._ranks = ranks

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before ranks report; this keeps registration from collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """All families, each with one sample a rank or link."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

        def add(kind: type, name: str, labels: dict[str, str], value: float) -> None:
            name = "kvrail_" + _NOT_A_NAME.sub("_", name)
            if name not in families:
                families[name] = kind(name, "see doc/metrics.md", labels=list(labels))
            families[name].add_metric(list(labels.values()), value)

        for rank in self._ranks:
            labels = {"rank": str(rank.rank)}
            add(GaugeMetricFamily, "rank_ready", labels, float(rank.usable))
            add(GaugeMetricFamily, "rank_requests", labels, float(rank.outstanding))
            for (incarnation, number), report in rank.links.items():
                lane = _link_labels(rank, incarnation.hex(), number)
                add(GaugeMetricFamily, "link_up", lane, float(report.state == "up"))
                if report.probes:
                    best = max(probe[1] for probe in report.probes)
                    add(GaugeMetricFamily, "link_probed_gb_per_s", lane, best)
                    add(GaugeMetricFamily, "link_probed_us", lane, min(probe[2] for probe in report.probes))
                    add(GaugeMetricFamily, "link_slow", lane, float(bool(report.slow)))
            if rank.stats is None:
                continue
            add(CounterMetricFamily, "steps", labels, float(rank.stats.steps))
            for name, value in rank.stats.gauges.items():
                add(GaugeMetricFamily, name, labels, value)
            for name, value in rank.stats.counters.items():
                add(CounterMetricFamily, name, labels, value)
            for incarnation_hex, number, counters in rank.stats.links:
                lane = _link_labels(rank, incarnation_hex, number)
                for name, value in counters.items():
                    add(CounterMetricFamily, f"link_{name}", lane, value)
        yield from families.values()


def _link_labels(rank: RankClient, incarnation: str, number: int) -> dict[str, str]:
    """The labels of a link: ours, theirs, and the lane that it uses ("" while it has none)."""
    report = rank.links.get((bytes.fromhex(incarnation), number))
    return {
        "rank": str(rank.rank),
        "peer": f"{incarnation}/{number}",
        "lane": report.lane if report else "",
        "transport": report.transport if report else "",
    }
