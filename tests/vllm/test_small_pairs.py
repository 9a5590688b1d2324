# SPDX-License-Identifier: Apache-2.0
"""Real pairs of tiny models: over two tensor-parallel ranks, and with pushes layer by layer."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kit.vllm_pair import ticket
from kit.vllm_servers import Router, VllmServer, random_prompt, small_pair, text_of

pytest.importorskip(
    "vllm.sampling_params", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
)

from kit.tiny_checkpoint import tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
# Around the edges of vLLM's blocks of 128 tokens and of its chunks of 256.
LENGTHS = (1, 128, 129, 300, 900)
VOCABULARY = range(300, 2000)
# vLLM's kernels for CPUs know no smaller heads.
SHAPE = {"head_dim": 32, "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Two engines of two ranks: each rank has a half of the heads."""
    folder = tmp_path_factory.mktemp("tp")
    model = tiny_checkpoint(folder / "model", "llama", **SHAPE)
    with small_pair(model, folder, ["--tensor-parallel-size", "2"]) as router:
        yield router


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """With layers of several KV cache groups, which share tensors."""
    folder = tmp_path_factory.mktemp("layers")
    model = tiny_checkpoint(folder / "model", "gemma3", sliding_window=256, **SHAPE)
    extra = {"push": "layer", "status_file": str(folder / "status")}
    with small_pair(model, folder, pe_extra=extra) as router:
        yield router


def check_answers(pair: Router) -> None:
    """One at a time and eight at a time, both ways in which routers ask."""
    for way, ask in pair.ways.items():
        for length in LENGTHS:
            prompt = random_prompt(VOCABULARY, length, seed=length + 10_000 * len(way))
            assert ask(prompt, 8) == text_of(pair.pe.complete(prompt, 8)), (way, length)
    prompts = [random_prompt(VOCABULARY, 20 + 37 * at, seed=at) for at in range(12)]
    ways = list(pair.ways.values())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        split = list(pool.map(lambda at: ways[at % 2](prompts[at], 8), range(len(prompts))))
    assert split == [text_of(pair.pe.complete(prompt, 8)) for prompt in prompts]
    check_idle(pair)


def check_leaving(pair: Router) -> None:
    """Clients of either side that hang up in some phase."""
    for number, after_s in enumerate((0.01, 0.05, 0.2, 0.01, 0.05, 0.2)):
        name, prompt = ticket(), random_prompt(VOCABULARY, 1200, seed=900 + number)
        of_ce, of_pe = (pair.ce, [*prompt, 1], pair.into(name)), (pair.pe, prompt, pair.out(name))
        leaving, staying = (of_ce, of_pe) if number % 2 else (of_pe, of_ce)
        thread = threading.Thread(
            target=lambda staying=staying: staying[0].complete(staying[1], 1, staying[2])
        )
        thread.start()
        leaving[0].begin_and_leave(leaving[1], leaving[2], after_s)
        thread.join()
    check_idle(pair)


def check_idle(pair: Router) -> None:
    for server in (pair.pe, pair.ce):
        server.wait_idle(60)


def test_ranks_answer_as_one_engine(ranks: Router) -> None:
    check_answers(ranks)
    for server in (ranks.pe, ranks.ce):
        # A link for each rank, and over each of them half of the heads.
        log = server.log.read_text()
        for rank in (0, 1):
            assert any("lane put/" in line for line in log.splitlines() if f"TP{rank}" in line), log[-3000:]


def test_clients_of_ranks_that_leave_hold_nothing(ranks: Router) -> None:
    check_leaving(ranks)


def test_layers_answer_as_one_engine(layers: Router) -> None:
    check_answers(layers)
    told = json.loads((layers.pe.log.parent / "status").read_text())["counters"]
    # (Not what was computed before its grant came.)
    assert 0 < told["bytes_ahead"] <= told["bytes"]


def test_clients_that_leave_between_layers_hold_nothing(layers: Router) -> None:
    check_leaving(layers)


def test_other_numbers_of_ranks_are_refused(ranks: Router, tmp_path: Path) -> None:
    """And both numbers are named."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        alone = VllmServer(
            ranks.pe.model,
            tmp_path,
            "ce-alone",
            # The same folder of sockets, and so the same token.
            {"peers": [f"127.0.0.1:{ranks.kv_port}"], "runtime_dir": str(ranks.pe.log.parent / "run")},
            more=["--kv-cache-memory-bytes", str(64 << 20)],
        )
    try:
        alone.wait_ready()
        began = time.monotonic()
        prompt = random_prompt(VOCABULARY, 100, seed=1)
        assert alone.complete(prompt, 4, ranks.into(ticket())) == {"error": 500}
        assert time.monotonic() - began < 30
        differ = "page layouts differ (tensor_parallel_size: '2' on the pe, '1' on the ce)"
        assert differ in ranks.pe.log.read_text()
        (failed,) = [line for line in alone.log.read_text().splitlines() if "did not come" in line]
        assert f"the peer refused: {differ}" in failed
        assert "choices" in alone.complete(prompt, 4)
        alone.wait_idle()
    finally:
        alone.stop()
    # The others go on.
    assert ranks.at_once(prompt, 4) == text_of(ranks.pe.complete(prompt, 4))


def test_ranks_that_are_killed(ranks: Router) -> None:
    """The prefill engine's end: the completion engine's client hears it, and nothing stays held."""
    prompt = random_prompt(VOCABULARY, 1500, seed=3)
    legs: list[object] = []

    def ask() -> None:
        try:
            legs.append(ranks.ce.complete([*prompt, 1], 8, ranks.into(name)))
        except httpx.HTTPError as error:
            legs.append(error)

    name = ticket()
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    # The call never comes, and the blocks are granted to both of its ranks.
    ranks.pe.kill()
    thread.join(60)
    assert legs == [{"error": 500}]
    ranks.ce.wait_idle(60)
    assert "choices" in ranks.ce.complete(prompt[:50], 4)
