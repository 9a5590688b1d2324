# SPDX-License-Identifier: Apache-2.0
"""Which lanes may be tried, and which proof each needs."""

from __future__ import annotations

import pytest

from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.lanes import (
    Facts,
    Wishes,
    check_required,
    fence_class,
    mps_refusal,
    no_peer,
    plan_lanes,
    put_carrier,
    rails_for,
)

AUTO = Wishes("auto", "auto", None)
PEER = Wishes("peer", "auto", None)
STREAM = Wishes("stream", "auto", None)
NEAR = Facts()
FAR = Facts(distance="no Unix socket: it is on another host", shared=False)
NO_CALL = "the completion engine does not listen for it"
GPUS = Facts(source="cuda", target="cuda", shared=False)


def test_near_and_free_tries_shm_first() -> None:
    plan = plan_lanes(AUTO, AUTO, NEAR)
    assert (plan.lanes, plan.scope, plan.reason) == (("shm", "put"), "all", "")


def test_far_gets_network_only_and_says_why() -> None:
    plan = plan_lanes(AUTO, AUTO, FAR)
    assert (plan.lanes, plan.scope) == (("stream", "put"), "network")
    assert "another host" in plan.reason
    plan = plan_lanes(AUTO, AUTO, FAR._replace(no_stream=NO_CALL))
    assert plan.lanes == ("put",)
    assert f"no stream: {NO_CALL}" in plan.reason


@pytest.mark.parametrize(
    "wishes", [(STREAM, AUTO), (AUTO, STREAM), (AUTO, Wishes("auto", "auto", "stream"))], ids=str
)
def test_stream_leaves_ucx_the_network_only(wishes: tuple[Wishes, Wishes]) -> None:
    for facts in (NEAR, FAR):
        plan = plan_lanes(*wishes, facts)
        assert (plan.lanes, plan.scope) == (("stream",), "network")


def test_stream_takes_part_where_nothing_local_is_left() -> None:
    assert plan_lanes(AUTO, AUTO, NEAR._replace(local_failed="no right to trace")).lanes == (
        "shm",
        "stream",
        "put",
    )
    assert plan_lanes(AUTO, Wishes("auto", "tcp", None), NEAR).lanes == ("shm", "stream", "put")
    assert plan_lanes(Wishes("put", "tcp", None), AUTO, FAR).lanes == ("put",)
    assert plan_lanes(AUTO, Wishes("auto", "auto", "put/tcp"), FAR).lanes == ("put",)
    assert plan_lanes(AUTO, AUTO, GPUS._replace(distance="another host")).lanes == ("put",)


@pytest.mark.parametrize("side", [0, 1])
def test_either_side_may_narrow(side: int) -> None:
    wishes = [AUTO, AUTO]
    wishes[side] = Wishes("put", "tcp", None)
    plan = plan_lanes(*wishes, NEAR)
    assert (plan.lanes, plan.scope, plan.put_transport) == (("put",), "network", "tcp")


def test_local_transports_that_failed_are_not_tried_again() -> None:
    plan = plan_lanes(Wishes("put", "auto", None), AUTO, NEAR._replace(local_failed="cma: not permitted"))
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
        (Wishes("put", "cma", None), AUTO, NEAR._replace(local_failed="not permitted"), "not permitted"),
        (PEER, AUTO, NEAR, "completion engine's pages are in host memory"),
        (PEER, AUTO, GPUS._replace(distance="another host"), "no peer: another host"),
        (PEER, AUTO, GPUS._replace(no_peer="no CUDA device open"), "no peer: no CUDA device open"),
        (PEER, AUTO, GPUS._replace(mps="shared through MPS"), "no peer: shared through MPS"),
        (PEER, Wishes("shm", "auto", None), GPUS, "--lane"),
        (STREAM, AUTO, GPUS, "no stream: the prefill engine's pages are in GPU memory"),
        (STREAM, AUTO, NEAR._replace(target="cuda"), "no stream: the completion engine's pages are in GPU"),
        (STREAM, AUTO, FAR._replace(no_stream=NO_CALL), "no stream: the completion engine does not listen"),
        (STREAM, Wishes("put", "auto", None), FAR, "--lane"),
        (AUTO, Wishes("auto", "auto", "stream"), GPUS, "no stream: the prefill engine's pages"),
        (Wishes("shm", "auto", None), AUTO, GPUS, "prefill engine's pages are in GPU memory"),
        (
            Wishes("shm", "auto", None),
            AUTO,
            NEAR._replace(target="cuda"),
            "completion engine's pages are in GPU",
        ),
        (AUTO, Wishes("auto", "auto", "peer"), GPUS._replace(distance="another host"), "required: peer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    ours: Wishes, theirs: Wishes, facts: Facts, word: str
) -> None:
    with pytest.raises(LaneUnavailable, match=word):
        plan_lanes(ours, theirs, facts)


def test_gpus_of_one_host_try_the_kernel_first() -> None:
    plan = plan_lanes(AUTO, AUTO, GPUS)
    assert (plan.lanes, plan.scope, plan.reason) == (("peer", "put"), "all", "")
    assert plan_lanes(PEER, AUTO, GPUS).lanes == ("peer",)
    assert plan_lanes(AUTO, Wishes("put", "auto", None), GPUS).lanes == ("put",)
    assert plan_lanes(AUTO, Wishes("auto", "auto", "peer"), GPUS).lanes == ("peer",)


def test_gpus_that_are_far_apart_get_the_network_and_the_reason() -> None:
    plan = plan_lanes(AUTO, AUTO, GPUS._replace(distance="another host"))
    assert (plan.lanes, plan.scope) == (("put",), "network")
    assert "no peer: another host" in plan.reason
    assert "no put/cuda_ipc: another host" in plan.reason


def test_under_mps_no_lane_needs_the_end_of_the_process() -> None:
    plan = plan_lanes(AUTO, AUTO, GPUS._replace(mps="MPS makes the writes"))
    assert (plan.lanes, plan.scope) == (("put",), "network")
    assert plan.reason.count("MPS makes the writes") == 2
    # Nothing of it touches host memory.
    assert plan_lanes(AUTO, AUTO, NEAR._replace(mps="MPS makes the writes")).scope == "all"


def test_host_pages_into_a_gpu_go_by_its_kernel_and_gpu_pages_into_a_host_by_put() -> None:
    up = Facts(target="cuda", shared=False)
    assert plan_lanes(AUTO, AUTO, up).lanes == ("peer", "put")
    plan = plan_lanes(AUTO, AUTO, up._replace(no_peer="no CUDA device open"))
    assert (plan.lanes, plan.reason) == (("put",), "no peer: no CUDA device open")
    assert plan_lanes(AUTO, AUTO, Facts(source="cuda"))[::3] == (("put",), "")


def test_what_two_gpus_know_of_each_other_beforehand() -> None:
    ours, theirs = Gpu(uuid=b"1" * 16, name="GPU A"), Gpu(uuid=b"2" * 16, name="GPU B")
    assert no_peer(ours, theirs) == mps_refusal(ours, theirs) == mps_refusal(None, None) == ""
    assert "host memory" in no_peer(ours, None)
    assert "--lane peer opens one" in no_peer(None, theirs)
    shared = Gpu(uuid=b"3" * 16, name="GPU C", mps="its control pipe is in /x")
    assert "prefill engine's GPU C" in mps_refusal(shared, theirs)
    assert "/x" in mps_refusal(ours, shared)


def test_required_transport_narrows_the_scope() -> None:
    assert plan_lanes(AUTO, Wishes("auto", "auto", "put/tcp"), NEAR)[:2] == (("put",), "network")
    assert plan_lanes(AUTO, Wishes("auto", "auto", "put/cma"), NEAR)[:2] == (("put",), "all")


def test_found_lane_is_held_against_every_wish() -> None:
    check_required("put/tcp", AUTO, Wishes("auto", "auto", "put"), Wishes("auto", "tcp", "put/tcp"))
    check_required("shm", AUTO, Wishes("auto", "tcp", "shm"))
    check_required("peer", AUTO, Wishes("peer", "auto", "peer"))
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
    assert fence_class("peer", ["tcp/lo"]) == "process"
    assert fence_class("stream", ["tcp/lo"]) == "worker"
    assert fence_class("stream", ["tcp/lo", "cma/memory"]) == "process"
    for local in ("cma/memory", "sysv/memory", "posix/memory", "xpmem/memory", "cuda_ipc/cuda"):
        assert fence_class("put", ["tcp/lo", local]) == "process"


def test_put_carrier_is_the_fastest_that_can_put() -> None:
    assert put_carrier(["sysv/memory", "cma/memory", "tcp/lo"]) == "cma"
    assert put_carrier(["cuda_ipc/cuda", "sysv/memory", "cma/memory"]) == "cma"
    assert put_carrier(["tcp/lo", "sysv/memory"]) == "tcp"
    assert put_carrier([]) == "?"
    assert put_carrier(["cuda_ipc/cuda", "rc_mlx5/mlx5_0:1", "cma/memory"], "cuda") == "cuda_ipc"
    assert put_carrier(["rc_mlx5/mlx5_0:1", "cma/memory"], "cuda") == "rc_mlx5"


def test_rails_where_a_second_thread_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert [rails_for(name) for name in ("cma", "tcp", "rc_mlx5", "?")] == [2, 1, 1, 1]
    assert (rails_for("tcp", 3), rails_for("cma", 1)) == (3, 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1})
    assert rails_for("cma") == 1
