# SPDX-License-Identifier: Apache-2.0
"""transfer-bench's plot: one chart a pair of memory kinds, one line a way, the limit dashed, nothing fetched."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvrail.frontend.bench_plot import plot
from kvrail.frontend.bench_record import Record


def record(way: str, memory: str, page_bytes: int, us: float, pace: str = "") -> Record:
    return Record.of(way, "cma", memory, (page_bytes, 64), [us, us, us], True, "thp", "sleep", pace)


RECORDS = [
    record(way, memory, size, us * (1 + size / 1e5))
    for memory in ("host->host", "gpu->gpu")
    for size in (4096, 65536, 1 << 20)
    for way, us in (("memcpy", 10.0), ("put/cma", 40.0))
] + [record("shm", "host->host", 65536, 30, pace="tight")]


def test_html_has_every_line(tmp_path: Path) -> None:
    path = tmp_path / "found.html"
    plot(RECORDS, path)
    text = path.read_text()
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["host-&gt;host", "gpu-&gt;gpu"]
    for chart in charts:
        lines = chart.findall("polyline")
        assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]
        assert ["stroke-dasharray" in line.attrib for line in lines] == [True, False]
        words = [text.text for text in chart.findall("text")]
        assert {"memcpy", "put/cma", "4 KiB", "64 KiB", "1 MiB", "GB/s"} <= set(words)
        # The faster way lies higher, and everything within the picture.
        heights = [[float(point.split(",")[1]) for point in line.attrib["points"].split()] for line in lines]
        assert all(a < b for a, b in zip(*heights, strict=True))
        assert all(0 < y < 420 for line in heights for y in line)
    # Single pages are no line, and nothing comes from elsewhere.
    assert "shm" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_size_has_one_point_a_way(tmp_path: Path) -> None:
    """Small batches, and those of the other mode, would make a line jump back and forth."""
    small = [
        Record.of("put/cma", "cma", "host->host", (size, 16), [9.0], True, "thp", threads, mode=mode)
        for size in (4096, 65536)
        for threads, mode in (("sleep", "asleep"), ("spin", "awake"))
    ]
    plots = []
    for number, records in enumerate((RECORDS, small + RECORDS, RECORDS + small)):
        path = tmp_path / f"{number}.html"
        plot(records, path)
        charts = re.findall(r"<svg.*?</svg>", path.read_text(), re.DOTALL)
        lines = [ElementTree.fromstring(svg).findall("polyline") for svg in charts]
        plots.append(sorted(line.attrib["points"] for chart in lines for line in chart))
    assert plots[0] == plots[1] == plots[2]


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="png needs the extra plot")
    path = tmp_path / "found.png"
    plot(RECORDS, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html or \.png"):
        plot(RECORDS, tmp_path / "found.pdf")
