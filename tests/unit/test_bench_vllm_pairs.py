# SPDX-License-Identifier: Apache-2.0
"""scripts/bench_vllm: what it says of two pairs, round by round."""

from __future__ import annotations

import io

from rich.console import Console

from kvrail.frontend.bench_vllm import _by_pairs, _pairs_table

NAN = float("nan")


def test_a_round_counts_for_both_or_for_none() -> None:
    found = _by_pairs("128 in", "second token", [10.0, NAN, 30.0, 40.0], [5.0, 6.0, 33.0, NAN])
    assert (found["rounds"], found["sooner_in"]) == (2, 1)
    assert found["later_ms"]["p50"] == -1.0
    # Each pair's own median is of all its rounds.
    assert found["ms"] == {"theirs": 30.0, "ours": 6.0}


def test_a_pair_that_never_answered_has_no_figures() -> None:
    found = _by_pairs("128 in", "last token", [NAN, NAN], [1.0, 2.0])
    assert (found["rounds"], found["sooner_in"], found["later_ms"]) == (0, 0, {})
    shown = io.StringIO()
    Console(file=shown, width=120).print(_pairs_table([found]))
    assert "last token" in shown.getvalue()
    assert "1.5" in shown.getvalue()
    assert "0 of 0" in shown.getvalue()
