# SPDX-License-Identifier: Apache-2.0
"""Which lanes two ranks may try, in which order, and what would prove their writers quiet. Pure decisions.

A lane whose writes end only with the writer's process (shm, peer, cma, …) is allowed only when the receiver can watch
that process: it came over a Unix socket, and there is a pidfd.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.link_events import Fence, Lane, LinkOptions

__all__ = [
    "RIVALS",
    "Facts",
    "LaneUnwanted",
    "Plan",
    "Wishes",
    "check_required",
    "fence_class",
    "has_local",
    "mps_refusal",
    "no_peer",
    "plan_lanes",
    "put_carrier",
    "rails_for",
]

# UCX transports whose writes are made by the writer's process itself (or its copy engines): destroying the
# receiver's worker does not end them.
_LOCAL = frozenset({"cma", "sysv", "posix", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc", "cuda_copy"})
# Of several transports on one endpoint, the first of these carries large puts of host memory. (cuda_ipc is not among
# them: it is on the list of every endpoint between processes that see a GPU, and reads device memory only.)
_NETWORK_CARRIERS = ("rc_mlx5", "dc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "tcp")
_CARRIERS = ("xpmem", "cma", *_NETWORK_CARRIERS)
# And of GPU memory.
_CUDA_CARRIERS = ("cuda_ipc", *_NETWORK_CARRIERS)
# Over cma the thread that puts a page copies it itself: two get further. Over tcp, where the peer's one thread has as
# much to do, a second one did not pay (doc/numbers.md); a network card needs none.
_RAILS = {"cma": 2}
# Lanes over the same network, of which neither is always the faster.
RIVALS: frozenset[Lane] = frozenset({"stream", "put"})


class LaneUnwanted(LaneUnavailable):
    """A lane works, but somebody's options forbid it."""


class Wishes(NamedTuple):
    """What one side permits (--lane, --put-transport, --require-lane)."""

    lane: str
    put_transport: str
    require_lane: str | None

    @classmethod
    def of(cls, options: LinkOptions) -> Wishes:
        return cls(options.lane, options.put_transport, options.require_lane)


class Facts(NamedTuple):
    """What a pair of ranks is like. Every reason is "" when nothing stands in the way.

    `distance`: why the receiver cannot watch the writer's process. `shared`: it passed its memfds. `local_failed`: why
    local UCX transports did not work for this pair before. `source`, `target`: where the writer's and the receiver's
    pages lie. `no_peer`: why the writer cannot copy into the receiver's GPU memory (see the function of that name).
    `no_stream`: why the receiver takes no connection for lane stream.
    `mps`: whose writes an MPS server makes.
    """

    distance: str = ""
    shared: bool = True
    local_failed: str = ""
    source: Literal["host", "cuda"] = "host"
    target: Literal["host", "cuda"] = "host"
    no_peer: str = ""
    no_stream: str = ""
    mps: str = ""


class Plan(NamedTuple):
    """Lanes to try in order, which worker addresses to use for it, and why others are not tried.

    Of `stream` and `put` over the same network the faster one is taken, if both work (`RIVALS`); else the first.
    """

    lanes: tuple[Lane, ...]
    scope: Literal["all", "network"]
    put_transport: str
    reason: str


def plan_lanes(ours: Wishes, theirs: Wishes, facts: Facts) -> Plan:
    """What to try between two ranks. Raises LaneUnavailable when their wishes, or the facts, leave nothing."""
    lane = _agree("--lane", ours.lane, theirs.lane)
    transport = _agree("--put-transport", ours.put_transport, theirs.put_transport)
    needs = {need for need in (ours.require_lane, theirs.require_lane) if need}
    required = {need.partition("/")[0] for need in needs}
    if transport == "auto" and {need.partition("/")[2] for need in needs} - {""} == {"tcp"}:
        transport = "tcp"  # put/<transport> narrows what UCX may pick.
    streams = lane == "stream" or (lane == "auto" and required == {"stream"})
    lanes: list[Lane] = []
    why: list[str] = []
    on_gpu = "cuda" in (facts.source, facts.target)
    # A lane that the memory rules out is no faster lane that is missed: only whoever asked for it hears why.
    if lane == "shm" or (lane == "auto" and not on_gpu):
        refused = _no_shm(facts)
        if refused:
            why.append(f"no shm: {refused}")
        else:
            lanes.append("shm")
    if lane == "peer" or (lane == "auto" and facts.target == "cuda"):
        refused = _no_peer(facts)
        if refused:
            why.append(f"no peer: {refused}")
        else:
            lanes.append("peer")
    local = "put/cuda_ipc" if on_gpu else "put/cma"
    local_refused = facts.distance or facts.local_failed or (facts.mps if on_gpu else "")
    # Lane stream is proven quiet by its own end. So that this is all that the link needs, UCX gets no local transport.
    network = bool(local_refused) or transport == "tcp" or streams
    if streams or (lane == "auto" and network and not on_gpu):
        refused = _no_stream(facts)
        if refused:
            why.append(f"no stream: {refused}")
        else:
            lanes.append("stream")
    if lane in ("auto", "put"):
        if transport == "cma" and local_refused:
            why.append(f"no put/cma: {local_refused}")
        else:
            lanes.append("put")
            if transport == "auto" and local_refused:
                why.append(f"no {local}: {local_refused}")
    wanted = tuple(name for name in lanes if not required - {name})
    if not wanted:
        need = f"required: {' and '.join(sorted(required))}" if lanes else "none is possible"
        raise LaneUnavailable("; ".join([f"no lane ({need})", *why]))
    return Plan(wanted, "network" if network else "all", transport, "; ".join(why))


def _on_gpu(facts: Facts) -> str:
    for whose, memory in (("prefill", facts.source), ("completion", facts.target)):
        if memory == "cuda":
            return f"the {whose} engine's pages are in GPU memory"
    return ""


def _no_shm(facts: Facts) -> str:
    return _on_gpu(facts) or facts.distance or ("" if facts.shared else "the peer shares no memory")


def _no_stream(facts: Facts) -> str:
    return _on_gpu(facts) or facts.no_stream


def _no_peer(facts: Facts) -> str:
    if facts.target != "cuda":
        return "the completion engine's pages are in host memory"
    return facts.distance or facts.mps or facts.no_peer


def no_peer(ours: Gpu | None, theirs: Gpu | None) -> str:
    """Why the writer's GPU (`ours`) cannot copy into the receiver's (`theirs`) as far as both can be told beforehand;
    "" when it is worth a try. `ours` is None on a rank that has opened no CUDA device.
    """
    if theirs is None:
        return "the completion engine's pages are in host memory"
    if ours is None:
        return "this prefill engine has no CUDA device open (with --device cpu, --lane peer opens one)"
    return ""


def mps_refusal(ours: Gpu | None, theirs: Gpu | None) -> str:
    """Why nothing that a GPU writes can be proven over: its process may end, and the MPS server writes on."""
    for whose, gpu in (("prefill", ours), ("completion", theirs)):
        if gpu is not None and gpu.mps:
            return (
                f"the {whose} engine's {gpu.name} is shared through MPS ({gpu.mps}), whose server makes the writes: "
                "the end of the engine's process would prove nothing"
            )
    return ""


def _agree(flag: str, ours: str, theirs: str) -> str:
    if "auto" in (ours, theirs):
        return theirs if ours == "auto" else ours
    if ours != theirs:
        raise LaneUnavailable(f"the two sides differ in {flag}: {ours} on the pe, {theirs} on the ce")
    return ours


def check_required(label: str, *wishes: Wishes) -> None:
    """Raise LaneUnwanted unless the lane `label` (shm, peer, put/cma, …) is what every side requires."""
    for wish in wishes:
        need = wish.require_lane
        if need and label != need and label.partition("/")[0] != need:
            raise LaneUnwanted(f"lane {label} works, but {need} is required (--require-lane)")
        if label.startswith("put/") and wish.put_transport not in ("auto", label.removeprefix("put/")):
            raise LaneUnwanted(f"UCX picked {label}, but --put-transport {wish.put_transport} is set")


def has_local(transports: Iterable[str]) -> bool:
    """Whether any of these UCX transports ("cma/memory", "tcp/lo", …) writes without the receiver's worker."""
    return any(name.partition("/")[0] in _LOCAL for name in transports)


def fence_class(lane: Lane, transports: Iterable[str]) -> Fence:
    """The proof that the most stubborn of everything that can carry writes on the link needs."""
    return "process" if lane in ("shm", "peer") or has_local(transports) else "worker"


def put_carrier(transports: Iterable[str], memory: str = "host") -> str:
    """The transport that UCX uses for puts between memories of that kind on an endpoint with these lanes; "?" when
    unknown.
    """
    names = {name.partition("/")[0] for name in transports}
    carriers = _CUDA_CARRIERS if memory == "cuda" else _CARRIERS
    return next((name for name in carriers if name in names), "?")


def rails_for(transport: str, wished: int = 0) -> int:
    """How many threads put over this transport at the same time; 0 wished: as many as pay on this machine."""
    return wished or min(_RAILS.get(transport, 1), len(os.sched_getaffinity(0)))
