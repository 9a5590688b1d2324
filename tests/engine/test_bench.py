# SPDX-License-Identifier: Apache-2.0
"""The engine benchmark runs, at a tiny size, and its records hold together."""

from __future__ import annotations

import json

from kvrail.runtime import bench_engine


def test_records(models, tmp_path, capsys) -> None:
    target = tmp_path / "bench.json"
    bench_engine.main(
        model=str(models.checkpoint("llama").folder), dtype="float32", threads=1, rounds=1, json_file=target
    )
    found = json.loads(target.read_text())
    assert found["machine"]["threads"] == 1
    assert [(r["what"], r["batch"], r["steps"]) for r in found["records"]] == [
        ("decode", 1, 32),
        ("decode", 8, 32),
        ("prefill", 1, 1),
    ]
    assert all(0 < r["tokens_per_s"] <= r["best_tokens_per_s"] for r in found["records"])
    assert "prefill" in capsys.readouterr().out
