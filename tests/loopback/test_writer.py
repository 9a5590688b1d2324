# SPDX-License-Identifier: Apache-2.0
"""Pages that are pushed land, and a writer ends in exactly one way, on every lane of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrail.transfer.ucx import EventKind

PUT, SHM, STREAM = 0, 1, 2
LANES = [
    pytest.param("cma", PUT, id="put-cma"),
    pytest.param("tcp", PUT, id="put-tcp"),
    pytest.param("tcp", SHM, id="shm"),
    pytest.param("tcp", STREAM, id="stream"),
]
INVALID_ADDRESS, TIMED_OUT = -7, -20
Make = Callable[..., Any]


def indices(values: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.asarray(values, dtype=np.uint32)


def numbered(end: Any, first: int = 1) -> None:
    """Every page has a content of its own."""
    end.data[:] = np.arange(first, first + end.data.size, dtype=np.uint64).reshape(end.data.shape)


@pytest.mark.parametrize("copy_threads", [0, 1, 3])
@pytest.mark.parametrize(("transport", "lane"), LANES)
def test_pages_land_and_the_bell_follows(
    make_pair: Make, transport: str, lane: int, copy_threads: int
) -> None:
    here, there = make_pair(transport, pages=128, page_bytes=16384, copy_threads=copy_threads)
    numbered(here)
    order = np.random.default_rng(1).permutation(128)
    source, target = order[:100], np.roll(order, 17)[:100]
    writer = here.link.writer(7, ttl_s=30.0)
    writer.push(lane, here.base, indices(source[:60]), indices(target[:60]))
    writer.push(lane, here.base, indices(source[60:]), indices(target[60:]))
    writer.ring(b"bell")
    assert there.messages() == [b"bell"]
    assert (there.data[target] == here.data[source]).all()
    assert not there.data[np.setdiff1d(np.arange(128), target)].any()
    assert here.take(EventKind.RUNG)[0][2:4] == (7, 0)
    assert (writer.posted, writer.done, writer.failed) == (100, 100, 0)
    writer.stop()
    assert here.take(EventKind.QUIET)[0][2:4] == (7, 0)
    assert here.none(EventKind.FAILED, 0.05)


@pytest.mark.parametrize(("copy_threads", "pushes"), [(0, 1), (0, 24), (1, 24)])
def test_nothing_sleeps_between_two_slices(make_pair: Make, copy_threads: int, pushes: int) -> None:
    here, there = make_pair("tcp", pages=24, page_bytes=1 << 20, copy_threads=copy_threads)
    writer = here.link.writer(1, ttl_s=30.0)
    begun = time.monotonic()
    for some in np.array_split(np.arange(24), pushes):
        writer.push(SHM, here.base, indices(some), indices(some))
    writer.ring(b"bell")
    assert there.messages() == [b"bell"]
    # Copying 24 MiB takes a few milliseconds; the longest sleep of the progress thread is 0.1 s.
    assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize("lane", [PUT, SHM, STREAM])
def test_large_units_are_cut_into_slices(make_pair: Make, lane: int) -> None:
    here, there = make_pair("cma", pages=3, page_bytes=(5 << 20) + 4096)
    numbered(here)
    writer = here.link.writer(1, ttl_s=30.0)
    writer.push(lane, here.base, indices([0, 2, 1]), indices([1, 0, 2]))
    writer.ring(b"")
    there.messages()
    assert (there.data[[1, 0, 2]] == here.data[[0, 2, 1]]).all()
    assert writer.done == 3


def test_progress_is_told_when_a_chunk_is_complete(make_pair: Make) -> None:
    here, there = make_pair("cma")
    numbered(here)
    writer = here.link.writer(5, ttl_s=30.0)
    for chunk in (range(8), range(8, 20)):
        writer.push(PUT, here.base, indices(chunk), indices(chunk))
        assert here.take(EventKind.PROGRESS)[0][2:4] == (5, 0)
        assert writer.done == chunk.stop
    assert (there.data[:20] == here.data[:20]).all()


def test_a_bell_without_pages_rings(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    here.link.writer(5, ttl_s=30.0).ring(b"nothing missing")
    assert there.messages() == [b"nothing missing"]
    here.take(EventKind.RUNG)


def test_runs_contiguous_on_both_sides_become_one_put(make_pair: Make) -> None:
    here, there = make_pair("cma", pages=64)
    numbered(here)
    before = here.reactor.stats()["puts"]
    writer = here.link.writer(1, ttl_s=30.0)
    # Source and target: 10 pages together, one alone, a gap on the target side only.
    source, target = [*range(10), 20, 30, 31, 32], [*range(40, 50), 5, 10, 11, 13]
    writer.push(PUT, here.base, indices(source), indices(target))
    writer.ring(b"")
    there.messages()
    assert here.reactor.stats()["puts"] - before == 4
    assert (there.data[target] == here.data[source]).all()


@pytest.mark.parametrize("lane", [PUT, SHM, STREAM])
@pytest.mark.parametrize(
    ("source", "target"), [([1, 2], [3, 64]), ([63, 64], [1, 2]), ([0], [2**32 - 1])], ids=str
)
def test_an_index_outside_is_refused_before_anything_is_written(
    make_pair: Make, lane: int, source: list[int], target: list[int]
) -> None:
    here, there = make_pair("cma", pages=64)
    numbered(here)
    writer = here.link.writer(3, ttl_s=30.0)
    writer.push(lane, here.base, indices(source), indices(target))
    writer.ring(b"never")
    _kind, _, key, status, reason = here.take(EventKind.FAILED)[0]
    assert (key, status) == (3, INVALID_ADDRESS)
    assert reason
    # A refusal leaves nothing under way, so quiet can be proven.
    writer.stop()
    assert here.take(EventKind.QUIET)[0][2:4] == (3, 0)
    assert there.none(EventKind.MESSAGE, 0.05)
    assert not there.data.any()


@pytest.mark.parametrize("page_bytes", [16384, (2 << 20) + 4096])
@pytest.mark.parametrize(("transport", "lane"), LANES)
def test_parts_of_units_land_and_nothing_beside_them(
    make_pair: Make, transport: str, lane: int, page_bytes: int
) -> None:
    """Also where a part is longer than a slice, and where units are neighbours on both sides: parts are none."""
    here, there = make_pair(transport, pages=12, page_bytes=page_bytes)
    numbered(here)
    source, target = [3, 4, 5, 11, 0], [7, 8, 9, 1, 2]
    cut, end = page_bytes // 32 * 24, page_bytes - 16
    writer = here.link.writer(1, ttl_s=30.0)
    writer.push(lane, here.base, indices(source), indices(target), part=(0, cut))
    writer.push(lane, here.base, indices(source[1:]), indices(target[1:]), part=(cut, end - cut))
    writer.ring(b"")
    there.messages()
    words = cut // 8, end // 8
    expected = np.zeros_like(there.data)
    expected[target, : words[0]] = here.data[source, : words[0]]
    expected[target[1:], words[0] : words[1]] = here.data[source[1:], words[0] : words[1]]
    assert (there.data == expected).all()
    assert (writer.posted, writer.done, writer.failed) == (9, 9, 0)


@pytest.mark.parametrize("lane", [PUT, SHM, STREAM])
@pytest.mark.parametrize("part", [(0, 16385), (16384, 1), (16383, 2), (2**64 - 8, 16)], ids=str)
def test_a_part_that_reaches_out_of_its_unit_is_refused(
    make_pair: Make, lane: int, part: tuple[int, int]
) -> None:
    here, there = make_pair("cma", pages=4, page_bytes=16384)
    numbered(here)
    writer = here.link.writer(3, ttl_s=30.0)
    with pytest.raises(ValueError, match="bytes"):
        writer.push(lane, here.base, indices([0]), indices([1]), part=(0, 0))
    writer.push(lane, here.base, indices([0]), indices([1]), part=part)
    writer.ring(b"never")
    _kind, _, key, status, reason = here.take(EventKind.FAILED)[0]
    assert (key, status) == (3, INVALID_ADDRESS)
    assert b"outside a unit" in reason
    assert there.none(EventKind.MESSAGE, 0.05)
    assert not there.data.any()


@pytest.mark.parametrize("lane", [PUT, SHM, STREAM])
def test_long_lists_go_in_pieces_to_the_last_unit(make_pair: Make, lane: int) -> None:
    units = 2 * 32768 + 5
    here, there = make_pair("cma", pages=units, page_bytes=64)
    numbered(here)
    order = np.random.default_rng(3).permutation(units)
    writer = here.link.writer(1, ttl_s=30.0)
    writer.push(lane, here.base, indices(order), indices(np.roll(order, 9)))
    writer.push(lane, here.base, indices([]), indices([]))
    writer.ring(b"bell")
    there.messages()
    assert (there.data[np.roll(order, 9)] == here.data[order]).all()
    assert writer.done == units
    wrong = indices(order)
    wrong[-1] = units
    refused = here.link.writer(2, ttl_s=30.0)
    refused.push(lane, here.base, indices(order), wrong)
    refused.ring(b"never")
    assert here.take(EventKind.FAILED)[0][2:4] == (2, INVALID_ADDRESS)
    refused.stop()
    assert here.take(EventKind.QUIET)[0][2:4] == (2, 0)


def test_an_unknown_pool_and_unregistered_memory_are_refused(make_pair: Make) -> None:
    here, _ = make_pair("cma")
    stranger = np.zeros(4096, dtype=np.uint8)
    for key, (pool, source) in enumerate([(9, here.base), (PUT, stranger.ctypes.data)]):
        here.link.writer(key, ttl_s=30.0).push(pool, source, indices([0]), indices([0]))
        assert here.take(EventKind.FAILED)[0][2] == key


@pytest.mark.parametrize(("transport", "lane"), LANES)
def test_a_writer_whose_time_is_over_is_refused(make_pair: Make, transport: str, lane: int) -> None:
    here, there = make_pair(transport)
    numbered(here)
    writer = here.link.writer(3, ttl_s=0.03)
    time.sleep(0.06)
    writer.push(lane, here.base, indices([0]), indices([0]))
    assert here.take(EventKind.FAILED)[0][2:4] == (3, TIMED_OUT)
    assert not there.data.any()
    renewed = here.link.writer(4, ttl_s=0.03)
    renewed.renew(30.0)
    time.sleep(0.06)
    renewed.push(lane, here.base, indices([0]), indices([0]))
    here.take(EventKind.PROGRESS)


@pytest.mark.parametrize(("transport", "lane"), LANES)
def test_nothing_lands_after_quiet(make_pair: Make, transport: str, lane: int) -> None:
    here, there = make_pair(transport, pages=64, page_bytes=1 << 20)
    here.data[:] = 1
    writer = here.link.writer(3, ttl_s=30.0)
    all_pages = indices(range(64))
    for _ in range(40):  # 2.5 GiB: far more than is done before the stop
        writer.push(lane, here.base, all_pages, all_pages[::-1].copy())
    time.sleep(0.02)
    writer.stop()
    assert here.take(EventKind.QUIET)[0][2:4] == (3, 0)
    assert writer.posted < 40 * 64
    assert writer.done == writer.posted
    there.data[:] = 7
    time.sleep(0.2)
    assert (there.data == 7).all()
    writer.push(lane, here.base, all_pages, all_pages)  # silently nothing
    assert here.none(EventKind.FAILED, 0.1)
    assert (there.data == 7).all()


@pytest.mark.parametrize("lane", [PUT, STREAM])
def test_writers_take_turns(make_pair: Make, lane: int) -> None:
    here, there = make_pair("cma", pages=64, page_bytes=1 << 20)
    long = here.link.writer(1, ttl_s=60.0)
    pages = indices(range(64))
    for _ in range(30):
        long.push(lane, here.base, pages, pages[::-1].copy())
    short = here.link.writer(2, ttl_s=60.0)
    short.push(lane, here.base, indices([0]), indices([0]))
    short.ring(b"short")
    assert there.messages() == [b"short"]
    assert long.done < 30 * 64
    long.stop()
    here.take(EventKind.QUIET)


def test_a_call_with_thousands_of_pages_returns_at_once(make_pair: Make) -> None:
    here, there = make_pair("cma", pages=8192, page_bytes=512)
    numbered(here)
    order = indices(np.random.default_rng(2).permutation(8192))
    took = []
    for key in range(9):
        writer = here.link.writer(key, ttl_s=30.0)
        began = time.perf_counter()
        writer.push(PUT, here.base, order, order)
        took.append(time.perf_counter() - began)
        writer.ring(b"")
        there.messages()
    assert (there.data == here.data).all()
    # Some 10 µs on a quiet machine; the copying itself takes a hundred times as long.
    assert sorted(took)[len(took) // 2] < 2e-3, took


@pytest.mark.parametrize("lane", [PUT, STREAM])
def test_a_dropped_writer_stops(make_pair: Make, lane: int) -> None:
    here, there = make_pair("tcp", pages=64, page_bytes=1 << 20)
    here.data[:] = 1
    writer = here.link.writer(3, ttl_s=30.0)
    for _ in range(20):
        writer.push(lane, here.base, indices(range(64)), indices(range(63, -1, -1)))
    del writer
    if lane == STREAM:
        # Behind what had begun.
        last = here.link.writer(4, ttl_s=30.0)
        last.push(STREAM, here.base, indices([0]), indices([63]))
        here.take(EventKind.PROGRESS)
    here.link.flush(1)
    here.take(EventKind.FLUSHED)
    there.data[:] = 7
    time.sleep(0.1)
    assert (there.data == 7).all()


def test_misuse_is_told_at_the_call(make_pair: Make) -> None:
    here, _ = make_pair("tcp")
    writer = here.link.writer(3, ttl_s=30.0)
    with pytest.raises(ValueError, match="as many"):
        writer.push(PUT, here.base, indices([0, 1]), indices([0]))
    with pytest.raises(TypeError):
        writer.push(PUT, here.base, np.array([0]), np.array([0]))
    writer.ring(b"")
    with pytest.raises(ValueError, match="doorbell"):
        writer.push(PUT, here.base, indices([0]), indices([0]))
    with pytest.raises(ValueError, match="doorbell"):
        writer.ring(b"")
    with pytest.raises(ValueError, match="negative"):
        here.link.writer(4, ttl_s=-1.0)


@pytest.mark.parametrize(("transport", "lane"), [LANES[0], *LANES[2:]])
def test_what_is_small_is_done_by_the_caller_while_the_progress_thread_sleeps(
    make_pair: Make, transport: str, lane: int
) -> None:
    here, there = make_pair(transport, pages=16, page_bytes=16384)
    numbered(here)
    times = []
    for number in range(1, 60):
        # All threads have fallen asleep.
        time.sleep(0.002)
        begun = time.monotonic()
        writer = here.link.writer(number, ttl_s=30.0)
        writer.push(lane, here.base, indices([number % 16]), indices([(number + 5) % 16]))
        writer.ring(b"%d" % number)
        assert there.messages() == [b"%d" % number]
        times.append(time.monotonic() - begun)
        assert (there.data[(number + 5) % 16] == here.data[number % 16]).all()
        assert here.take(EventKind.RUNG)[0][2:4] == (number, 0)
    # Three a round (writer, push, bell) when the machine is quiet.
    assert here.reactor.stats()["light_turns"] > 59
    # A worker that were no longer armed would sleep for 0.1 s.
    assert sorted(times)[len(times) // 2] < 0.05


@pytest.mark.parametrize("way", ["", "put"])
def test_what_is_large_is_left_to_the_progress_thread(make_pair: Make, way: str) -> None:
    here, there = make_pair("cma", pages=16, page_bytes=65536)
    if way:
        # The pool's best way is then shm, whose copy threads would leave the caller little to do.
        here.import_both(PUT)
    writer = here.link.writer(1, ttl_s=30.0)
    time.sleep(0.002)
    before = here.reactor.stats()["light_turns"]
    writer.push(PUT, here.base, indices(range(16)), indices(range(16)), way=way)
    assert here.reactor.stats()["light_turns"] == before
    writer.ring(b"bell")
    assert there.messages() == [b"bell"]
    assert writer.done == 16
