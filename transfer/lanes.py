# SPDX-License-Identifier: Apache-2.0
"""Which lanes two ranks may try, in which order, and what would prove their writers quiet. Pure decisions.

A lane whose writes end only with the writer's process (shm, cma, …) is allowed only when the receiver can watch that
process: it came over a Unix socket, and there is a pidfd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.link_events import Fence, LinkOptions

__all__ = [
    "LaneUnwanted",
    "Plan",
    "Wishes",
    "check_required",
    "fence_class",
    "has_local",
    "plan_lanes",
    "put_carrier",
]

# UCX transports whose writes are made by the writer's process itself (or its copy engines): destroying the
# receiver's worker does not end them.
_LOCAL = frozenset({"cma", "sysv", "posix", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc", "cuda_copy"})
# Of several transports on one endpoint, the first of these carries large puts of host memory. (cuda_ipc is not among
# them: it is on the list of every endpoint between processes that see a GPU, and reads device memory only.)
_CARRIERS = ("xpmem", "cma", "rc_mlx5", "dc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "tcp")


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


class Plan(NamedTuple):
    """Lanes to try in order, which worker addresses to use for it, and why others are not tried."""

    lanes: tuple[Literal["shm", "put"], ...]
    scope: Literal["all", "network"]
    put_transport: str
    reason: str


def plan_lanes(ours: Wishes, theirs: Wishes, *, distance: str, shared: bool, local_failed: str = "") -> Plan:
    """What to try between two ranks. Raises LaneUnavailable when their wishes, or the facts, leave nothing.

    `distance`: why the receiver cannot watch the writer's process ("" when it can). `shared`: it passed its memfds.
    `local_failed`: why local UCX transports did not work for this pair before ("" when not tried).
    """
    lane = _agree("--lane", ours.lane, theirs.lane)
    transport = _agree("--put-transport", ours.put_transport, theirs.put_transport)
    lanes: list[Literal["shm", "put"]] = []
    why: list[str] = []
    if lane in ("auto", "shm"):
        if distance or not shared:
            why.append(f"no shm: {distance or 'the peer shares no memory'}")
        else:
            lanes.append("shm")
    local_refused = distance or local_failed
    if lane in ("auto", "put"):
        if transport == "cma" and local_refused:
            why.append(f"no put/cma: {local_refused}")
        else:
            lanes.append("put")
            if transport == "auto" and local_refused:
                why.append(f"no put/cma: {local_refused}")
    required = {need.partition("/")[0] for need in (ours.require_lane, theirs.require_lane) if need}
    wanted = tuple(name for name in lanes if not required - {name})
    if not wanted:
        need = f"required: {' and '.join(sorted(required))}" if lanes else "none is possible"
        raise LaneUnavailable("; ".join([f"no lane ({need})", *why]))
    if transport == "auto":
        # put/<transport> narrows what UCX may pick.
        narrowed = {need.partition("/")[2] for need in (ours.require_lane, theirs.require_lane) if need} - {
            ""
        }
        transport = "tcp" if narrowed == {"tcp"} else transport
    return Plan(
        wanted, "network" if local_refused or transport == "tcp" else "all", transport, "; ".join(why)
    )


def _agree(flag: str, ours: str, theirs: str) -> str:
    if "auto" in (ours, theirs):
        return theirs if ours == "auto" else ours
    if ours != theirs:
        raise LaneUnavailable(f"the two sides differ in {flag}: ours {ours}, theirs {theirs}")
    return ours


def check_required(label: str, *wishes: Wishes) -> None:
    """Raise LaneUnwanted unless the lane `label` (shm, put/cma, …) is what every side requires."""
    for wish in wishes:
        need = wish.require_lane
        if need and label != need and label.partition("/")[0] != need:
            raise LaneUnwanted(f"lane {label} works, but {need} is required (--require-lane)")
        if label.startswith("put/") and wish.put_transport not in ("auto", label.removeprefix("put/")):
            raise LaneUnwanted(f"UCX picked {label}, but --put-transport {wish.put_transport} is set")


def has_local(transports: Iterable[str]) -> bool:
    """Whether any of these UCX transports ("cma/memory", "tcp/lo", …) writes without the receiver's worker."""
    return any(name.partition("/")[0] in _LOCAL for name in transports)


def fence_class(lane: Literal["shm", "put"], transports: Iterable[str]) -> Fence:
    """The proof that the most stubborn of everything that can carry writes on the link needs."""
    return "process" if lane == "shm" or has_local(transports) else "worker"


def put_carrier(transports: Iterable[str]) -> str:
    """The transport that UCX uses for puts of host memory on an endpoint with these lanes; "?" when unknown."""
    names = {name.partition("/")[0] for name in transports}
    return next((name for name in _CARRIERS if name in names), "?")
