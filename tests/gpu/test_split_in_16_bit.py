# SPDX-License-Identifier: Apache-2.0
"""A split on GPUs in bfloat16 with FlashInfer: the pages that arrive are those that were sent, and decode alike."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kit.cluster import Server, serving, wait_until
from kit.split import Split, ask, start_single, start_split, wait_for_links
from kit.tiny_checkpoint import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device (torch {torch.__version__})"),
]

CE_DEVICE = f"cuda:{min(1, max(0, torch.cuda.device_count() - 1))}"
# No prompt is cut: then every product has the same shape on both sides, and 16 bits round alike.
FLAGS = ("--dtype", "bfloat16", "--attention", "flashinfer", "--max-num-batched-tokens", "2048")
PROMPTS = 20


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Split]]:
    pytest.importorskip("flashinfer")
    folder = tmp_path_factory.mktemp("bf16")
    model = tiny_checkpoint(
        folder / "model", "llama", hidden_size=256, head_dim=64, max_position_embeddings=4096
    )
    with ExitStack() as stack:
        single = start_single(model, folder, "--device", "cuda:0", *FLAGS)
        on_pe, on_ce = ("--device", "cuda:0"), ("--device", CE_DEVICE)
        split = start_split(
            model, folder, "peer", 16, "--lane", "peer", *FLAGS, pe_flags=on_pe, ce_flags=on_ce
        )
        stack.enter_context(serving(single, split.pe, split.ce))
        wait_for_links(split.ce, split.pe, within_s=150)
        yield single.wait_ready(), split


def compare(single: Server, split: Split, concurrency: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvrail.frontend.check_identity", "--prompts", str(PROMPTS)]
    command += ["--no-chat", "--ref", single.url, "--split", split.ce.url, "--max-tokens", "24"]
    command += ["--dtype", "bfloat16", "--concurrency", str(concurrency), "--expect-lane", split.lane]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_alone_every_token_is_the_single_engines(servers: tuple[Server, Split]) -> None:
    single, split = servers
    done = compare(single, split, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{PROMPTS} compared, 0 different, 0 not remote" in done.stdout, done.stdout


def test_in_batches_pages_are_equal_and_only_near_ties_differ(servers: tuple[Server, Split]) -> None:
    """Batches of other shapes round otherwise: what differs is said with the gap of its logits."""
    single, split = servers
    done = compare(single, split, 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{PROMPTS} compared" in done.stdout
    print(done.stdout)
    gaps = [float(gap) for gap in re.findall(r"logit gap of the reference ([0-9.e+-]+)", done.stdout)]
    assert all(gap < 0.5 for gap in gaps), gaps
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0
    assert split.ce.metric("kvrail_pages_verified_total") >= PROMPTS
    for server in (split.pe, split.ce):
        wait_until(lambda s=server: s.metric("kvrail_pages_held") == 0, 10, "nothing is held", server)  # type: ignore[misc]


def test_long_prompts_decode_alike(servers: tuple[Server, Split]) -> None:
    """In one chunk or two; their pages are queued for the link before the chunk is computed."""
    single, split = servers
    for length in (1500, 2048, 3500):
        prompt = [300 + (37 * i * i + length) % 1700 for i in range(length)]
        one, two = (
            ask(server.url, prompt=prompt, max_tokens=16, ignore_eos=True) for server in (single, split.ce)
        )
        assert two.headers["x-kvrail-prefill"] == "remote"
        assert one.json()["choices"][0]["text"] == two.json()["choices"][0]["text"]
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0
    pages, nbytes = (split.pe.metric(f"kvrail_link_{name}_total") for name in ("pages", "bytes"))
    assert nbytes / pages == 2 * 2 * 16 * 2 * 64 * 2, "each page counts once, whole"
    assert nbytes == sum(split.pe.metric(f"kvrail_link_bytes_by_{way}_total") for way in ("kernel", "engine"))
    for server in (split.pe, split.ce):
        wait_until(lambda s=server: s.metric("kvrail_pages_held") == 0, 10, "nothing is held", server)  # type: ignore[misc]
