# SPDX-License-Identifier: Apache-2.0
"""The cost model finds again what it was made of, and the way it picks is never a bad one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.transfer.link_events import Probe, Way
from kvrail.transfer.planner import Cost, Planner, count_runs

MIB = 1 << 20
# (bytes, runs) of the probes of a lane with several ways: see lane_test.
GPU_SIZES = ((4096, 1), (256 << 10, 1), (256 * MIB, 64), (256 << 10, 64))
WAYS: tuple[Way, ...] = ("kernel", "engine", "put", "shm")

costs = st.builds(
    Cost,
    latency_s=st.floats(2e-6, 1e-3),
    per_run_s=st.one_of(st.just(0.0), st.floats(1e-7, 1e-4)),
    per_byte_s=st.floats(1e-12, 1e-8),
)


def probes_of(cost: Cost, way: Way, sizes: tuple[tuple[int, int], ...] = GPU_SIZES) -> list[Probe]:
    return [
        Probe(nbytes, nbytes / seconds / 1e9, seconds * 1e6, runs, way)
        for nbytes, runs in sizes
        if (seconds := cost.seconds(nbytes, runs))
    ]


@given(costs)
def test_exact_measurements_give_the_costs_back(cost: Cost) -> None:
    found = Cost.fit(probes_of(cost, "engine"))
    assert min(found) >= 0
    for nbytes, runs in GPU_SIZES:
        assert found.seconds(nbytes, runs) == pytest.approx(cost.seconds(nbytes, runs), rel=1e-3)


@given(st.lists(st.floats(0.5, 5000), min_size=1, max_size=4))
def test_whatever_was_measured_no_cost_is_negative(times_us: list[float]) -> None:
    probes = [Probe(n, 1.0, us, runs, "put") for (n, runs), us in zip(GPU_SIZES, times_us, strict=False)]
    found = Cost.fit(probes)
    assert min(found) >= 0
    assert max(found) > 0
    small, large = found.seconds(4096, 1), found.seconds(4 * MIB, 64)
    assert 0 < small <= large


@given(
    st.dictionaries(st.sampled_from(WAYS), costs, min_size=1),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 16),
)
def test_the_chosen_way_is_within_a_tenth_of_the_best(
    by_way: dict[Way, Cost], nbytes: int, runs: int
) -> None:
    planner = Planner(by_way)
    chosen = planner.choose(nbytes, runs)
    assert chosen in by_way
    best = min(cost.seconds(nbytes, runs) for cost in by_way.values())
    assert by_way[chosen].seconds(nbytes, runs) <= 1.1 * best


def test_h200_figures_send_scattered_pages_by_kernel_and_large_ones_by_engine() -> None:
    """The two ways as measured over NVLink: the engine pays 3 µs a run, the kernel waits longer for its start."""
    kernel, engine = Cost(15e-6, 0.0, 1 / 370e9), Cost(12e-6, 3e-6, 1 / 390e9)
    planner = Planner.of([*probes_of(kernel, "kernel"), *probes_of(engine, "engine")])
    assert planner.choose(4096 * 16384, 16384) == "kernel"
    assert planner.choose(64 << 10, 1) == "engine"
    assert planner.choose(1 << 30, 16) == "engine"
    assert planner.gb_per_s == pytest.approx(390, rel=0.05)


def test_what_becomes_ready_bit_by_bit_leaves_in_parts_over_slow_links() -> None:
    """Each part costs a millisecond: that is saved from the third millisecond of a push on."""
    assert Planner({}).parts(1 << 30) == 1
    nvlink = Planner({"engine": Cost(12e-6, 3e-6, 1 / 380e9), "kernel": Cost(15e-6, 0.0, 1 / 370e9)})
    network = Planner({"put": Cost(10e-6, 1e-6, 1 / 25e9)})
    assert [nvlink.parts(size * MIB) for size in (16, 1024, 4096)] == [1, 1, 3]
    assert [network.parts(size * MIB) for size in (16, 128, 512, 8192)] == [1, 2, 4, 8]


def test_another_link_gives_another_choice() -> None:
    """Nothing is fixed: where the engine costs nothing a run, it takes what the kernel took above."""
    kernel, engine = Cost(15e-6, 0.0, 1 / 50e9), Cost(12e-6, 0.0, 1 / 50e9)
    planner = Planner.of([*probes_of(kernel, "kernel"), *probes_of(engine, "engine")])
    assert planner.choose(4096 * 16384, 16384) == "engine"


def test_one_way_is_taken_and_none_is_none() -> None:
    assert Planner.of([]).choose(1, 1) is None
    assert Planner.of([]).gb_per_s == 0
    only = Planner.of([Probe(4096, 1.0, 4.0, 1, "put")])
    assert only.choose(1 << 40, 99) == "put"
    with pytest.raises(ValueError, match="no probe"):
        Cost.fit([])


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=40))
def test_runs_are_those_of_neighbours_on_both_sides(pairs: list[tuple[int, int]]) -> None:
    source, target = (
        np.array(side, dtype=np.uint32) for side in (zip(*pairs, strict=True) if pairs else ((), ()))
    )
    breaks = sum((s + 1, t + 1) != (s_next, t_next) for (s, t), (s_next, t_next) in itertools.pairwise(pairs))
    assert count_runs(source, target) == (1 + breaks if pairs else 0)


def test_runs_by_hand() -> None:
    def runs(source: list[int], target: list[int]) -> int:
        return count_runs(np.array(source, dtype=np.uint32), np.array(target, dtype=np.uint32))

    assert runs([1, 2, 3], [7, 8, 9]) == 1
    assert runs([1, 2, 3], [7, 8, 10]) == 2
    assert runs([3, 2, 1], [3, 2, 1]) == 3
    assert runs([], []) == 0
