# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared: a split (PE and CE) and single ones, started, awaited, and stopped for sure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvrail.frontend.launched import Launched, free_port, undisturbed
from kvrail.frontend.split_bench.places import Places, joined
from kvrail.runtime.role_settings import flags_for

__all__ = ["MODEL", "Engine", "Plan", "plans", "running"]

# The name that all engines give the model, so that their requests are the same.
MODEL = "bench"
_POLL_S = 0.25


@dataclass(frozen=True)
class Plan:
    """What to start: `pe` and `ce` for a split, `ce` alone for a single engine."""

    name: str
    ce: Places
    pe: Places | None = None

    @property
    def devices(self) -> int:
        """GPUs (or CPU ranks) that it uses; a GPU that PE and CE share counts once."""
        if self.pe is None:
            return self.ce.count
        shared = len(self.pe.gpus & self.ce.gpus)
        return self.pe.count + self.ce.count - shared

    @property
    def prefill_ranks(self) -> int:
        """Ranks that prefill."""
        return (self.pe or self.ce).count


@dataclass
class Engine:
    """A running plan. `front`: whom to ask; `pe`: None for a single engine."""

    plan: Plan
    front: Launched
    pe: Launched | None = None
    roles: list[Launched] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As the tables call it."""
        return self.plan.name

    @property
    def url(self) -> str:
        """Of the OpenAI API."""
        return self.front.url


def plans(pe: Places, ce: Places) -> list[Plan]:
    """The split, a single engine on the PE's devices, and one on all. Raises ValueError.

    Where the split prefills: GPUs of one host differ by some percent, of a long prompt more than its hand-over takes.
    """
    everything = joined(pe, ce)
    found = [Plan(f"split {pe.count}+{ce.count}", ce, pe), Plan(f"single {pe.count}", pe)]
    if everything.count != pe.count:
        found.append(Plan(f"single {everything.count}", everything))
    return found


@contextlib.contextmanager
def running(
    wanted: Sequence[Plan],
    *,
    flags: Sequence[str],
    pe_flags: Sequence[str] = (),
    ce_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    logs: Path,
    within_s: float,
    say: Callable[[str], None],
) -> Iterator[list[Engine]]:
    """Start all of `wanted` at once, wait until they are ready with every link up, and stop them on the way out.

    `flags`: each for the roles that have it; `pe_flags`, `ce_flags`: for that role; `prefill_flags`: for those that
    prefill (PE and single). `say` is told how far they are. Raises LaunchFailed.
    """
    with contextlib.ExitStack() as stack:
        roles: list[Launched] = []

        def stop() -> None:
            with undisturbed():
                for role in roles:
                    role.ask_to_stop()
                for role in roles:
                    role.stop()

        stack.callback(stop)

        def launch(role: str, places: Places, *more: str) -> Launched:
            common = ("--served-model-name", MODEL, "--access-log", "none", *flags_for(role, flags))
            with undisturbed():
                roles.append(Launched(role, free_port(), logs, *places.flags, *common, *more))
            return roles[-1]

        engines = []
        for plan in wanted:
            if plan.pe is None:
                front = launch("single", plan.ce, *prefill_flags)
                engines.append(Engine(plan, front, None, [front]))
            else:
                pe = launch("pe", plan.pe, *prefill_flags, *pe_flags)
                front = launch("ce", plan.ce, "--pe-url", pe.url, "--local-prefill", "never", *ce_flags)
                engines.append(Engine(plan, front, pe, [pe, front]))
        _wait(engines, time.monotonic() + within_s, say)
        yield engines


def _wait(engines: Sequence[Engine], deadline: float, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    while True:
        waiting = {engine.name: trouble for engine in engines if (trouble := _missing(engine))}
        if not waiting:
            return
        late = next(engine for engine in engines if engine.name in waiting)
        if time.monotonic() > deadline:
            raise late.front.failed(f"of {late.name} did not become ready: {waiting[late.name]}")
        text = "; ".join(f"{name}: {trouble}" for name, trouble in waiting.items())
        say(f"starting, {time.monotonic() - began:.0f} s: {text}")
        time.sleep(_POLL_S)


def _missing(engine: Engine) -> str:
    """What it still lacks: every rank of every role, and of a split the link of every pair."""
    for role, places in zip(engine.roles, _places(engine.plan), strict=True):
        if not role.ready():
            return f"the {role.role} is not ready"
        try:
            ranks = _ready_ranks(role.url)
            if ranks < places.count:
                return f"{ranks} of {places.count} ranks of the {role.role} are ready"
            if engine.pe is role or engine.plan.pe is None:
                continue
            links = httpx.get(f"{role.url}/lanes", timeout=10, trust_env=False).json()["links"]
        except httpx.HTTPError:
            return f"the {role.role} does not answer"
        pairs = engine.plan.pe.count * engine.plan.ce.count
        up = sum(link["state"] == "up" for link in links)
        if up < pairs:
            why = next((link["reason"] for link in links if link["reason"]), "")
            return f"{up} of {pairs} links are up{why and ': ' + why}"
    return ""


def _places(plan: Plan) -> list[Places]:
    return [plan.ce] if plan.pe is None else [plan.pe, plan.ce]


def _ready_ranks(url: str) -> int:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    return sum(line.startswith("kvrail_rank_ready{") and line.endswith(" 1.0") for line in text.splitlines())
