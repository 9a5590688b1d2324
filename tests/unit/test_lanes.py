# SPDX-License-Identifier: Apache-2.0
"""Which lanes may be tried, and which proof each needs."""

from __future__ import annotations

import pytest

from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.lanes import Wishes, check_required, fence_class, plan_lanes, put_carrier

AUTO = Wishes("auto", "auto", None)
NEAR = {"distance": "", "shared": True}
FAR = {"distance": "no Unix socket: it is on another host", "shared": False}


def test_near_and_free_tries_shm_first() -> None:
    plan = plan_lanes(AUTO, AUTO, **NEAR)
    assert (plan.lanes, plan.scope, plan.reason) == (("shm", "put"), "all", "")


def test_far_gets_network_only_and_says_why() -> None:
    plan = plan_lanes(AUTO, AUTO, **FAR)
    assert (plan.lanes, plan.scope) == (("put",), "network")
    assert "another host" in plan.reason


@pytest.mark.parametrize("side", [0, 1])
def test_either_side_may_narrow(side: int) -> None:
    wishes = [AUTO, AUTO]
    wishes[side] = Wishes("put", "tcp", None)
    plan = plan_lanes(*wishes, **NEAR)
    assert (plan.lanes, plan.scope, plan.put_transport) == (("put",), "network", "tcp")


def test_local_transports_that_failed_are_not_tried_again() -> None:
    plan = plan_lanes(Wishes("put", "auto", None), AUTO, **NEAR, local_failed="cma: not permitted")
    assert (plan.lanes, plan.scope) == (("put",), "network")
    assert "not permitted" in plan.reason


@pytest.mark.parametrize(
    ("ours", "theirs", "facts", "word"),
    [
        (Wishes("shm", "auto", None), AUTO, FAR, "another host"),
        (Wishes("put", "cma", None), AUTO, FAR, "another host"),
        (Wishes("shm", "auto", None), Wishes("put", "auto", None), NEAR, "--lane"),
        (Wishes("put", "cma", None), Wishes("put", "tcp", None), NEAR, "--put-transport"),
        (AUTO, Wishes("auto", "auto", "shm"), FAR, "required: shm"),
        (Wishes("put", "auto", None), Wishes("auto", "auto", "shm"), NEAR, "required: shm"),
        (Wishes("put", "cma", None), AUTO, NEAR | {"local_failed": "not permitted"}, "not permitted"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    ours: Wishes, theirs: Wishes, facts: dict[str, object], word: str
) -> None:
    with pytest.raises(LaneUnavailable, match=word):
        plan_lanes(ours, theirs, **facts)


def test_required_transport_narrows_the_scope() -> None:
    assert plan_lanes(AUTO, Wishes("auto", "auto", "put/tcp"), **NEAR)[:2] == (("put",), "network")
    assert plan_lanes(AUTO, Wishes("auto", "auto", "put/cma"), **NEAR)[:2] == (("put",), "all")


def test_found_lane_is_held_against_every_wish() -> None:
    check_required("put/tcp", AUTO, Wishes("auto", "auto", "put"), Wishes("auto", "tcp", "put/tcp"))
    check_required("shm", AUTO, Wishes("auto", "tcp", "shm"))
    for bad in (
        Wishes("auto", "auto", "shm"),
        Wishes("auto", "auto", "put/cma"),
        Wishes("auto", "cma", None),
    ):
        with pytest.raises(LaneUnavailable):
            check_required("put/tcp", AUTO, bad)


def test_the_worst_transport_decides_the_fence() -> None:
    assert fence_class("put", ["tcp/lo"]) == "worker"
    assert fence_class("put", ["rc_mlx5/mlx5_0:1", "tcp/eth0"]) == "worker"
    assert fence_class("shm", ["tcp/lo"]) == "process"
    for local in ("cma/memory", "sysv/memory", "posix/memory", "xpmem/memory", "cuda_ipc/cuda"):
        assert fence_class("put", ["tcp/lo", local]) == "process"


def test_put_carrier_is_the_fastest_that_can_put() -> None:
    assert put_carrier(["sysv/memory", "cma/memory", "tcp/lo"]) == "cma"
    assert put_carrier(["cuda_ipc/cuda", "sysv/memory", "cma/memory"]) == "cma"
    assert put_carrier(["tcp/lo", "sysv/memory"]) == "tcp"
    assert put_carrier([]) == "?"
