# SPDX-License-Identifier: Apache-2.0
"""bench_split's arithmetic: devices from flags, what links carried, and which errors are its own clock's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvrail.frontend.split_bench.campaign import too_long
from kvrail.frontend.split_bench.charts import charts
from kvrail.frontend.split_bench.engines import plans
from kvrail.frontend.split_bench.places import Places, read_places
from kvrail.frontend.split_bench.report import markdown
from kvrail.frontend.split_bench.runner import Settings, in_turn, was_cut
from kvrail.frontend.split_bench.watch import Carried, Link, Links, added

LINK = Link(0, 0, "peer/cuda_ipc", "cuda", 200.0, "", 0, 0, 0, 0)


def link(pe: int, ce: int, **counted: Any) -> Link:
    return dataclasses.replace(LINK, pe_rank=pe, ce_rank=ce, **counted)


def test_places() -> None:
    assert read_places("0-3", "--pe-gpus") == read_places("0,1, 2-3", "--pe-gpus") == Places(0, 4)
    assert read_places("4", "--ce-gpus").flags == ("--dp", "1", "--device", "cuda:4")
    assert read_places("cpu,cpu", "--ce-gpus").flags == ("--dp", "2", "--device", "cpu")
    for wrong in ("", "gpu", "3-1", "0,2", "1,0", "0-", "cpu,0"):
        with pytest.raises(ValueError, match="--pe-gpus"):
            read_places(wrong, "--pe-gpus")


def test_plans_have_the_same_gpus() -> None:
    split, few, all_ = plans(Places(0, 2), Places(2, 6))
    assert [plan.name for plan in (split, few, all_)] == ["split 2+6", "single 2", "single 8"]
    assert [plan.devices for plan in (split, few, all_)] == [8, 2, 8]
    assert [plan.prefill_ranks for plan in (split, few, all_)] == [2, 2, 8]
    # Prompts are compared on the same GPUs: two of a kind differ by more than a hand-over takes.
    assert few.ce == Places(0, 2)
    assert all_.ce == Places(0, 8)
    # A PE and a CE on one GPU.
    split, single = plans(Places(0, 1), Places(0, 1))
    assert (split.devices, single.devices) == (1, 1)


def test_what_links_carried() -> None:
    before = Links((link(0, 0, bytes=1e9, tickets=1, unhidden_s=5.0, by_way={"kernel": 1e9}), link(0, 1)))
    after = Links(
        (
            link(
                0,
                0,
                bytes=4e9,
                pages=3,
                tickets=3,
                unhidden_s=5.004,
                by_way={"kernel": 1.5e9, "engine": 2.5e9},
            ),
            link(0, 1, bytes=1e9, tickets=2, unhidden_s=0.004),
        )
    )
    carried = after.since(before, 2.0)
    assert (carried.bytes, carried.tickets) == (4e9, 4)
    # The slowest had 1 GB, the mean is 2.
    assert carried.fairness == pytest.approx(0.5)
    # 4 GB at 200 GB/s take 20 ms: 5 for each of four prompts, of which 2 came after the prompt.
    assert carried.probed_ms == pytest.approx(5.0)
    assert carried.unhidden_ms == pytest.approx(2.0)
    assert carried.hidden == pytest.approx(0.6)
    assert carried.links[0].by_way == {"kernel": 0.5e9, "engine": 2.5e9}
    twice = added([carried, carried])
    assert twice.links[0].by_way == {"kernel": 1e9, "engine": 5e9}
    assert (twice.bytes, twice.seconds, twice.hidden) == (8e9, 4.0, pytest.approx(0.6))


def test_what_is_not_known_is_not_made_up() -> None:
    nothing = Carried(1.0, (link(0, 0),))
    assert (nothing.fairness, nothing.unhidden_ms, nothing.hidden) == (None, None, None)
    unprobed = Carried(1.0, (link(0, 0, bytes=1e9, tickets=1, probed_gb_per_s=0.0),))
    assert unprobed.hidden is None
    assert unprobed.unhidden_ms == 0


def test_turns_and_cuts() -> None:
    assert [list(in_turn("ab", turn)) for turn in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]  # type: ignore[arg-type]
    assert was_cut(["HTTP 500", "no end of the answer within 3 s"])
    assert not was_cut(["HTTP 500"])


def test_charts_leave_out_what_was_cut() -> None:
    row = {"part": "load", "engine": "split 1+1", "tok_per_s_user": 50.0, "tok_per_s_device": 700.0}
    (chart,) = charts([row, {**row, "tok_per_s_user": 20.0}, {**row, "cut": True}], "GPU")
    assert chart.lines == {"split 1+1": [(20.0, 700.0), (50.0, 700.0)]}
    assert chart.ticks == [20.0, 50.0]
    assert not charts([{**row, "errors": 1}], "GPU")


def test_lengths_that_the_model_does_not_take() -> None:
    settings = Settings(4096, 256, (1,), 2, 900, 1, 1, 1, 512, 256, 700, 1, (128, 990), 1, 1, 1, 1, 1, 1, 2)
    assert "load wants 4352: give --in or --out less" in too_long(1000, settings, {"load", "push"})
    assert "handover wants 994" in too_long(993, settings, {"push", "mixed", "handover"})
    assert "mixed wants 768" in too_long(767, settings, {"mixed"})
    assert not too_long(994, settings, {"push", "mixed", "handover", "replay"})


def test_a_rate_that_came_with_errors_is_compared_with_nothing() -> None:
    settings = Settings(64, 8, (1,), 2, 900, 1, 1, 1, 32, 8, 700, 1, (128,), 1, 1, 1, 1, 1, 1, 2)
    carried = Carried(
        2.0, (link(0, 0, bytes=1e9, tickets=1, unhidden_s=0.001, by_way={"engine": 1e9, "kernel": 0.0}),)
    ).record()
    row = {"part": "push", "errors": 0, "cut": False}
    split = {**row, "engine": "split 1+1", "prompt_tok_per_s_rank": 90.0, "carried": carried}
    single = {**row, "engine": "single 1", "prompt_tok_per_s_rank": 100.0}
    assert "the split is -10.0 %" in markdown([split, single], settings, "GPU")
    assert "hidden: 80 %" in markdown([split, single], settings, "GPU")
    assert "(engine 100 %, kernel 0 %)" in markdown([split, single], settings, "GPU")
    for bad in ({"errors": 3}, {"cut": True}):
        assert "the split is" not in markdown([split, {**single, **bad}], settings, "GPU")
        assert "the split is" not in markdown([{**split, **bad}, single], settings, "GPU")
