# SPDX-License-Identifier: Apache-2.0
"""A whole split on GPUs: PE and CE as `runtime launch` starts them, equal to one engine, over both lanes of GPUs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import httpx
import pytest
import torch

from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, Split, ask, links, start_single, start_split, wait_for_links
from kit.tiny_checkpoint import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device (torch {torch.__version__})"),
]

LANES = {"peer": ("--lane", "peer"), "put/cuda_ipc": ("--lane", "put")}
# Both sides on one GPU where there is only one.
CE_DEVICE = f"cuda:{min(1, max(0, torch.cuda.device_count() - 1))}"
# Prompts longer than the token budget are prefilled in chunks, and pushed chunk by chunk.
FLAGS = ("--max-num-batched-tokens", "64", "--attention", "torch")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Split]]]:
    """(the single engine, the split of each lane), started together."""
    folder = tmp_path_factory.mktemp("gpus")
    model = tiny_checkpoint(folder / "model", "llama")
    with ExitStack() as stack:
        single = start_single(model, folder, "--device", "cuda:0", "--attention", "torch")
        stack.enter_context(serving(single))
        splits = {}
        for lane, flags in LANES.items():
            splits[lane] = split = start_split(
                model,
                folder,
                lane,
                16,
                *FLAGS,
                *flags,
                pe_flags=("--device", "cuda:0"),
                ce_flags=("--device", CE_DEVICE),
            )
            stack.enter_context(serving(split.pe, split.ce))
        for split in splits.values():
            wait_for_links(split.ce, split.pe, within_s=120)
        yield single.wait_ready(), splits


@pytest.mark.parametrize("lane", LANES)
def test_the_split_answers_as_one_engine_does(servers: tuple[Server, dict[str, Split]], lane: str) -> None:
    single, splits = servers
    split = splits[lane]
    command = [sys.executable, "-P", "-m", "kvrail.frontend.check_identity", "--prompts", "12", "--no-chat"]
    command += ["--ref", single.url, "--split", split.ce.url, "--max-tokens", "8", "--concurrency", "4"]
    done = subprocess.run(
        [*command, "--expect-lane", lane], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 compared, 0 different, 0 not remote" in done.stdout
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0
    assert split.ce.metric("kvrail_pages_verified_total") >= 12
    for server in (split.pe, split.ce):
        wait_until(lambda s=server: s.metric("kvrail_pages_held") == 0, 10, "nothing is held", server)  # type: ignore[misc]


@pytest.mark.parametrize("lane", LANES)
def test_clients_that_leave_while_pages_fly_disturb_nobody(
    servers: tuple[Server, dict[str, Split]], lane: str
) -> None:
    """Two hundred hang up at random moments; then those that stay get the single engine's answers."""
    single, splits = servers
    split = splits[lane]

    def come_and_go(number: int) -> None:
        random = Random(number)
        prompt = [random.randrange(300, 2000) for _ in range(random.randrange(1, 500))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": random.randrange(1, 12), "stream": True}
        with contextlib.suppress(httpx.TimeoutException, httpx.RemoteProtocolError):
            limit = random.uniform(0.01, 0.5)
            httpx.post(f"{split.ce.url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=limit))

    with ThreadPoolExecutor(16) as visitors:
        list(visitors.map(come_and_go, range(200)))
    for server in (split.pe, split.ce):
        wait_until(lambda s=server: s.metric("kvrail_pages_held") == 0, 20, "nothing is held", server)  # type: ignore[misc]
        assert server.metric("kvrail_quarantined_pages") == 0
    for number in range(20):
        prompt = [400 + (37 * number + 11 * i) % 1500 for i in range(10 + 20 * number)]
        answers = [ask(server.url, prompt=prompt, max_tokens=8) for server in (single, split.ce)]
        assert answers[1].headers["x-kvrail-prefill"] == "remote"
        one, two = (answer.json()["choices"][0]["text"] for answer in answers)
        assert one == two
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0


@pytest.mark.parametrize("lane", LANES)
def test_lanes_and_metrics_say_which_way_pages_went(
    servers: tuple[Server, dict[str, Split]], lane: str
) -> None:
    split = servers[1][lane]
    answer = ask(split.ce.url, prompt=[400 + i for i in range(40)])
    assert answer.headers["x-kvrail-prefill"] == "remote"
    ways = {"kernel", "engine"} if lane == "peer" else {"put"}
    for server in (split.pe, split.ce):
        (link,) = (link for link in links(server) if link["state"] == "up")
        assert (link["memory"], link["transport"], link["reason"]) == ("cuda", "cuda_ipc", "")
        assert {probe["way"] for probe in link["probes"]} == ways
        assert server.metric("kvrail_link_probed_gb_per_s") > 0
        print(lane, *link["probes"], sep="\n  ")

    def went() -> dict[str, float]:
        return {way: split.pe.metric(f"kvrail_link_bytes_by_{way}_total") for way in ways}

    wait_until(lambda: sum(went().values()) > 0, 10, "bytes are counted by their way", split.pe)
    print(lane, went())
    assert sum(went().values()) == split.pe.metric("kvrail_link_bytes_total")
    assert split.pe.metric("kvrail_link_failures_total") == 0


def test_a_ce_killed_in_the_middle_does_not_hurt_the_pe(
    servers: tuple[Server, dict[str, Split]], tmp_path: Path
) -> None:
    """kill -9 of the whole CE while prompts are prefilled and pushed; another CE gets its pages from the same PE."""
    split = servers[1]["peer"]
    folder = split.pe.log.parent
    common = ("--served-model-name", MODEL, "--dtype", "float32", "--page-tokens", "16")
    flags = (*common, "--kv-pages", "1024", "--pe-url", split.pe.url, "--local-prefill", "never", *FLAGS)
    model = folder / "model"
    victim, other = (
        Server("ce", model, folder, *flags, "--device", CE_DEVICE, "--require-lane", "peer") for _ in range(2)
    )
    with serving(victim, other):
        wait_for_links(victim, split.pe)
        asking = [
            subprocess.Popen(
                [sys.executable, "-c", _ASK, victim.url, MODEL, str(seed)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for seed in range(4)
        ]
        before = victim.metric("kvrail_link_pages_total")
        wait_until(lambda: victim.metric("kvrail_link_pages_total") > before, 20, "pages come", victim)
        victim.kill()
        for each in asking:
            each.wait(30)
        wait_for_links(other, split.pe)
        answer = ask(other.url, prompt=[500 + i for i in range(40)])
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvrail-prefill"] == "remote"
        wait_until(lambda: split.pe.metric("kvrail_pages_held") == 0, 20, "the pe holds nothing", split.pe)
        assert other.metric("kvrail_checksum_mismatches_total") == 0


_ASK = """
import sys, httpx
url, model, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
while True:
    prompt = [400 + (seed * 131 + 7 * i) % 1500 for i in range(500)]
    seed += 4
    httpx.post(url + "/v1/completions", timeout=20, json={"model": model, "prompt": prompt, "max_tokens": 2}).json()
"""
