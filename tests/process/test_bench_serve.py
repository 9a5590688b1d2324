# SPDX-License-Identifier: Apache-2.0
"""bench_serve against real engines: a split and a single one take turns, and its records hold together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def run(*flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvrail.frontend.bench_serve", *flags],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_split_and_single_in_turns(cluster: Cluster, tmp_path: Path) -> None:
    split, single, out = cluster.split("shm"), cluster.single("shm"), tmp_path / "found.json"
    urls = ("--url", single.url, "--url", split.ce.url)
    before = split.ce.metric("kvrail_prefills_remote_total")
    status, said = run(
        *urls, "--in", "20,100", "--out", "6", "--requests", "3", "--logprobs", "--json", str(out)
    )
    assert status == 0, said
    assert "second server against the first" in said
    found = json.loads(out.read_text())
    assert [(one["url"], one["in"], one["rounds"]) for one in found["records"]] == [
        (url, length, 3) for length in (20, 100) for url in (single.url, split.ce.url)
    ]
    for record in found["records"]:
        (kind,) = record["kinds"].values()
        assert (kind["requests"], kind["good"], kind["prompt_tokens"]) == (3, 3, record["in"])
        assert 0 < kind["ttft_ms"]["p50"] <= kind["ttft_ms"]["max"]
        assert record["tok_per_s"] > 0
    assert {entry["load"] for entry in found["second_against_first"]} == {
        "20 in, 6 out x 1",
        "100 in, 6 out x 1",
    }
    # Warm-ups and all: every prompt of the split went to the prefill engine.
    assert split.ce.metric("kvrail_prefills_remote_total") >= before + 8


def test_mixed_load_and_chat(cluster: Cluster, tmp_path: Path) -> None:
    split, out = cluster.split("shm"), tmp_path / "found.json"
    flags = ("--url", split.ce.url, "--in", "20", "--out", "20", "--concurrency", "2", "--seconds", "3")
    status, said = run(*flags, "--long-every", "0.5", "--long-in", "300", "--json", str(out))
    assert status == 0, said
    (record,) = json.loads(out.read_text())["records"]
    assert record["kinds"]["long"]["good"] >= 4
    assert record["kinds"]["long"]["prompt_tokens"] == 300
    assert record["kinds"]["short"]["good"] >= 1
    status, said = run(
        "--url", split.ce.url, "--in", "120", "--out", "4", "--requests", "2", "--chat", "--json", str(out)
    )
    assert status == 0, said
    (record,) = json.loads(out.read_text())["records"]
    assert record["kinds"]["short"]["prompt_tokens"] == pytest.approx(120, rel=0.2)


def test_what_cannot_work_is_said(cluster: Cluster) -> None:
    single = cluster.single("shm")
    for flags, words in (
        (("--url", "http://127.0.0.1:9"), "cannot ask http://127.0.0.1:9/v1/models"),
        (("--url", single.url, "--in", "5000"), "takes 640 tokens, prompt and answer; 5064 are wanted"),
        (("--url", single.url, "--model", "other"), "serves tiny, and not other"),
        (("--url", single.url, "--url", single.url), "twice the same server"),
        (("--url", single.url, "--in", "many"), "token counts such as"),
    ):
        status, said = run(*flags)
        assert status == 2, said
        assert words in " ".join(said.replace("│", " ").split())
        assert "Traceback" not in said
