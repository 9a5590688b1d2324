# SPDX-License-Identifier: Apache-2.0
"""All parts in order: which engines run for each, with which flags, and for how long."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvrail.frontend.launched import LaunchFailed
from kvrail.frontend.split_bench.engines import Engine, Plan, running
from kvrail.frontend.split_bench.handover import handover_part
from kvrail.frontend.split_bench.parts import load_part, mixed_part, push_part
from kvrail.frontend.split_bench.replay import replay_part
from kvrail.frontend.split_bench.runner import Clock, Runner, Settings

__all__ = ["LIMITS", "Campaign", "too_long"]

# Seconds of each part, in the order in which they run.
LIMITS = {"load": 300.0, "push": 90.0, "mixed": 180.0, "handover": 120.0, "replay": 300.0}
_TOGETHER = {"load": load_part, "push": push_part, "mixed": mixed_part, "handover": handover_part}
# Host cache and routing of the engines of all parts but the replay.
_PLAIN = ("0", "least-loaded")
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
            alone = [name for name in self._chosen if name == "load" and self._on_gpus]
            for name in alone:
                share = self.limits_s[name] / len(self.plans)
                for plan in self.plans:
                    with self._running([plan], alone=True) as engines:
                        _TOGETHER[name](engines, self.settings, self.runner, Clock(share))
            together = [name for name in self._chosen if name not in alone]
            replays = self._replays()
            if together:
                with self._running(self.plans) as engines:
                    for name in together:
                        _TOGETHER[name](engines, self.settings, self.runner, Clock(self.limits_s[name]))
                    if _PLAIN in replays:
                        self._replay(engines, *_PLAIN)
                        replays.remove(_PLAIN)
            for cache_gb, routing in replays:
                with self._running(self.plans, cache_gb=cache_gb, routing=routing) as engines:
                    self._replay(engines, cache_gb, routing)
        except LaunchFailed as error:
            return str(error)
        except httpx.HTTPError as error:
            return f"an engine does not answer any more: {error!r}; logs in {self.logs}"
        return ""

    def _replays(self) -> list[tuple[str, str]]:
        """(host cache, routing) of every launch that is to be replayed."""
        if "replay" not in self.limits_s:
            return []
        return list(itertools.product(self.host_cache_gb, self.routing))

    def _replay(self, engines: Sequence[Engine], cache_gb: str, routing: str) -> None:
        clock = Clock(self.limits_s["replay"] / len(self._replays()))
        replay_part(engines, self.settings, self.runner, clock, routing=routing, host_cache_gb=cache_gb)

    @property
    def _on_gpus(self) -> bool:
        return self.plans[0].ce.first is not None

    @property
    def _chosen(self) -> list[str]:
        return [name for name in _TOGETHER if name in self.limits_s]

    @contextlib.contextmanager
    def _running(
        self,
        plans: Sequence[Plan],
        *,
        alone: bool = False,
        cache_gb: str = _PLAIN[0],
        routing: str = _PLAIN[1],
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
            prefill_flags=("--hicache-size-gb", cache_gb),
            logs=self.logs,
            within_s=self.start_within_s,
            say=self.runner.say,
        ) as engines:
            for engine in engines:
                card = httpx.get(f"{engine.url}/v1/models", timeout=30, trust_env=False).json()["data"][0]
                if why := too_long(card["max_model_len"], self.settings, self.limits_s):
                    raise LaunchFailed(f"{engine.name} {why}")
            yield engines
            self.runner.say("stopping " + ", ".join(engine.name for engine in engines))


def too_long(most: int, settings: Settings, chosen: Collection[str]) -> str:
    """Which chosen part wants more than `most` tokens, prompt and answer, and what to do; "" when none does."""
    mixed = max(settings.mixed_in + settings.mixed_out, settings.mixed_long_in + 1)
    wanted = {
        "load": ("--in or --out", settings.tokens_in + settings.tokens_out),
        "push": ("--push-in", settings.push_in + 2),
        "mixed": ("--mixed-long-in", mixed),
        "handover": ("--handover-in", max(settings.handover_in) + 4),
    }
    for part, (flag, tokens) in wanted.items():
        if part in chosen and tokens > most:
            what = f"takes {most} tokens, prompt and answer; {part} wants {tokens}"
            return f"{what}: give {flag} less, or choose other --parts"
    return ""
