# SPDX-License-Identifier: Apache-2.0
"""All parts in order: which engines run for each, with which flags, and for how long."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvrail.frontend.launched import LaunchFailed
from kvrail.frontend.split_bench.engines import Engine, Plan, running
from kvrail.frontend.split_bench.handover import handover_part
from kvrail.frontend.split_bench.parts import load_part, mixed_part, push_part
from kvrail.frontend.split_bench.replay import replay_part
from kvrail.frontend.split_bench.runner import Clock, Runner, Settings
from kvrail.runtime.config import LaunchConfig

__all__ = ["LIMITS", "Campaign"]

# Seconds of each part, in the order in which they run.
LIMITS = {"load": 300.0, "push": 90.0, "mixed": 180.0, "handover": 120.0, "replay": 300.0}
_TOGETHER = {"load": load_part, "push": push_part, "mixed": mixed_part, "handover": handover_part}
_SHARED_GPU_GB, _SHARED_CPU_GB = 16.0, 0.25


@dataclass(frozen=True)
class Campaign:
    """`flags`: for every role. `kv_gb`: of an engine alone on its GPUs; `kv_gb_shared`: where several run at once."""

    plans: Sequence[Plan]
    settings: Settings
    limits_s: Mapping[str, float]
    runner: Runner
    logs: Path
    start_within_s: float
    flags: Sequence[str]
    pe_flags: Sequence[str]
    ce_flags: Sequence[str]
    kv_gb: float | None
    kv_gb_shared: float | None
    routing: Sequence[str]
    host_cache_gb: Sequence[str]

    def run(self) -> str:
        """Run the parts that have a limit; returns what went wrong with the engines, "" when nothing did."""
        try:
            alone = [name for name in self._chosen(_TOGETHER) if name == "load" and self._on_gpus]
            for name in alone:
                share = self.limits_s[name] / len(self.plans)
                for plan in self.plans:
                    with self._running([plan], alone=True) as engines:
                        _TOGETHER[name](engines, self.settings, self.runner, Clock(share))
            together = [name for name in self._chosen(_TOGETHER) if name not in alone]
            if together:
                with self._running(self.plans) as engines:
                    for name in together:
                        _TOGETHER[name](engines, self.settings, self.runner, Clock(self.limits_s[name]))
            if "replay" in self.limits_s:
                self._replay()
        except LaunchFailed as error:
            return str(error)
        except httpx.HTTPError as error:
            return f"an engine does not answer any more: {error!r}; logs in {self.logs}"
        return ""

    def _replay(self) -> None:
        launches = list(
            itertools.product(self.host_cache_gb if _host_cache_exists() else ["0"], self.routing)
        )
        for cache_gb, routing in launches:
            with self._running(self.plans, routing=routing, cache_gb=cache_gb) as engines:
                clock = Clock(self.limits_s["replay"] / len(launches))
                replay_part(
                    engines, self.settings, self.runner, clock, routing=routing, host_cache_gb=cache_gb
                )

    @property
    def _on_gpus(self) -> bool:
        return self.plans[0].ce.first is not None

    def _chosen(self, names: Mapping[str, object]) -> list[str]:
        return [name for name in names if name in self.limits_s]

    @contextlib.contextmanager
    def _running(
        self,
        plans: Sequence[Plan],
        *,
        alone: bool = False,
        routing: str = "least-loaded",
        cache_gb: str = "0",
    ) -> Iterator[list[Engine]]:
        most = max(self.settings.concurrency) if "load" in self.limits_s else 1
        most = max(most, self.settings.mixed_streams, self.settings.conversations)
        ranks = min(plan.ce.count for plan in plans)
        ours = {
            "--max-num-seqs": str(max(64, math.ceil(most / ranks))),
            "--max-queue": str(max(256, 4 * most)),
            "--routing": routing,
        }
        shared_gpus = any(plan.pe is not None and plan.pe.gpus & plan.ce.gpus for plan in plans)
        memory_gb = self.kv_gb
        if not alone or shared_gpus:
            memory_gb = self.kv_gb_shared or (_SHARED_GPU_GB if self._on_gpus else _SHARED_CPU_GB)
        if memory_gb is not None and "--kv-pages" not in self.flags:
            ours["--kv-memory-gb"] = f"{memory_gb:g}"
        # The user's word counts.
        flags = [word for flag, value in ours.items() if flag not in self.flags for word in (flag, value)]
        with running(
            plans,
            flags=(*flags, *self.flags),
            pe_flags=self.pe_flags,
            ce_flags=self.ce_flags,
            prefill_flags=("--hicache-size-gb", cache_gb) if _host_cache_exists() else (),
            logs=self.logs,
            within_s=self.start_within_s,
            say=self.runner.say,
        ) as engines:
            _refuse_what_is_too_long(engines, self.settings, self.limits_s)
            yield engines
            self.runner.say("stopping " + ", ".join(engine.name for engine in engines))


def _host_cache_exists() -> bool:
    return any(field.name == "hicache_size_gb" for field in dataclasses.fields(LaunchConfig))


def _refuse_what_is_too_long(
    engines: Sequence[Engine], settings: Settings, chosen: Mapping[str, float]
) -> None:
    """Say at once which length the model does not take. Raises LaunchFailed."""
    wanted = {
        "load": ("--in, --out", settings.tokens_in + settings.tokens_out),
        "push": ("--push-in", settings.push_in + 2),
        "mixed": (
            "--mixed-long-in",
            max(settings.mixed_in + settings.mixed_out, settings.mixed_long_in + 1),
        ),
        "handover": ("--handover-in", max(settings.handover_in) + 4),
    }
    for engine in engines:
        card = httpx.get(f"{engine.url}/v1/models", timeout=30, trust_env=False).json()["data"][0]
        for part in wanted.keys() & chosen.keys():
            flag, tokens = wanted[part]
            if tokens > card["max_model_len"]:
                raise LaunchFailed(
                    f"{engine.name} takes {card['max_model_len']} tokens, prompt and answer; {part} wants {tokens}: "
                    f"give {flag} less, or choose other --parts"
                )
