# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server counts for us. They stand beside vLLM's own, in the registry that its /metrics shows."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

__all__ = ["SplitCounters"]

_BETWEEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class SplitCounters:
    """The counters of one server process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.route = Counter(
            "kvrail_prefills",
            "prompts by where they were prefilled; fallback: elsewhere in vain, and then here",
            ["route"],
            registry=registry,
        )
        self.calls = Counter(
            "kvrail_prefill_calls",
            "calls of a prefill engine, made by a ce or taken by a pe",
            ["outcome"],
            registry=registry,
        )
        self.handover = Histogram(
            "kvrail_handover_seconds",
            "from the first token of a prompt that was prefilled elsewhere to the second",
            buckets=_BETWEEN_S,
            registry=registry,
        )
        for route in ("remote", "local", "fallback"):
            self.route.labels(route)
        for outcome in ("accepted", "refused", "unreachable"):
            self.calls.labels(outcome)
