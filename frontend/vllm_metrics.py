# SPDX-License-Identifier: Apache-2.0
"""Our figures under the names that dashboards for vLLM know, where the meaning is the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrail.runtime.control.rank_client import RankClient

__all__ = ["RequestMetrics", "VllmNames"]

_TOKENS = (
    1,
    10,
    50,
    100,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
)
_REQUEST_S = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class RequestMetrics:
    """Figures of whole requests, under the names that dashboards for vLLM know; the meaning is the same."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return made.labels(model)

        self.end_to_end = histogram("e2e_request_latency_seconds", "of whole requests", _REQUEST_S)
        self.queued = histogram("request_queue_time_seconds", "until a rank had a place", _REQUEST_S)
        self.decoding = histogram("request_decode_time_seconds", "from first token to last", _REQUEST_S)
        self.prompt = histogram("request_prompt_tokens", "tokens of prompts", _TOKENS)
        self.generation = histogram("request_generation_tokens", "tokens of answers", _TOKENS)
        self.success = Counter(
            "vllm:request_success",
            "answers, by why they ended",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._model = model
        for reason in ("stop", "length"):
            # From the start: of a counter that first shows itself as 1, differences miss that 1.
            self.success.labels(model, reason)

    def succeeded(self, reason: str) -> None:
        """An answer has ended well."""
        self.success.labels(self._model, reason).inc()


class VllmNames(Collector):
    """What is counted already, once more under its other name: nothing is counted twice for it."""

    def __init__(
        self,
        ranks: Sequence[RankClient],
        model: str,
        *,
        histograms: Mapping[str, Histogram],
        counters: Mapping[str, Counter],
        waiting: Gauge,
    ) -> None:
        self._ranks = ranks
        self._model = model
        self._histograms = histograms
        self._counters = counters
        self._waiting = waiting

    def describe(self) -> Iterator[Metric]:
        """Keeps registration from collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """One sample each, over all ranks and routes."""
        labels = ["model_name"]
        for name, histogram in self._histograms.items():
            buckets: defaultdict[str, float] = defaultdict(float)
            total = 0.0
            for sample in (sample for metric in histogram.collect() for sample in metric.samples):
                if sample.name.endswith("_bucket"):
                    buckets[sample.labels["le"]] += sample.value
                elif sample.name.endswith("_sum"):
                    total += sample.value
            ordered = sorted(buckets.items(), key=lambda bucket: float(bucket[0])) or [("+Inf", 0.0)]
            family = HistogramMetricFamily(f"vllm:{name}", "see doc/metrics.md", labels=labels)
            family.add_metric([self._model], ordered, total)
            yield family
        for name, counter in self._counters.items():
            value = sum(
                s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total")
            )
            one = CounterMetricFamily(f"vllm:{name}", "see doc/metrics.md", labels=labels)
            one.add_metric([self._model], value)
            yield one
        for name, value in self._gauges().items():
            gauge = GaugeMetricFamily(f"vllm:{name}", "see doc/metrics.md", labels=labels)
            gauge.add_metric([self._model], value)
            yield gauge

    def _gauges(self) -> dict[str, float]:
        reports = [rank.stats.gauges for rank in self._ranks if rank.stats is not None]

        def total(name: str) -> float:
            return sum(report.get(name, 0.0) for report in reports)

        capacity = total("pages_capacity")
        waiting = sum(sample.value for metric in self._waiting.collect() for sample in metric.samples)
        return {
            "num_requests_running": total("sequences_running"),
            "num_requests_waiting": total("sequences_waiting") + waiting,
            # Cached pages count as free: they give way to whoever needs room.
            "kv_cache_usage_perc": total("pages_held") / capacity if capacity else 0.0,
        }
