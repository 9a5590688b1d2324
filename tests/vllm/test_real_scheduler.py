# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's own scheduler, of whatever version is installed: no model and no GPU is needed for that."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # Warnings are errors here, and vLLM and what it imports have theirs.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.sched.async_scheduler")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kit.tiny_model import write_model_folder
from kvrail.runtime.vllm import versions
from kvrail.runtime.vllm.connector import WorkerNews

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, BLOCKS, BUDGET = 16, 64, 64
TICKET = "ab" * 16


class Engine:
    """vLLM's scheduler with our connector in it; the test is its worker."""

    def __init__(
        self, model: Path, role: str, folder: Path, kind: type[Scheduler], policy: str = "fail"
    ) -> None:
        extra: dict[str, Any] = {"runtime_dir": str(folder)}
        if role == "kv_consumer":
            extra["peers"] = ["127.0.0.1:14579"]
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = BLOCKS
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=BUDGET,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=kind is AsyncScheduler,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvrailConnector",
                kv_connector_module_path="kvrail.runtime.vllm.connector",
                kv_role=role,
                kv_connector_extra_config=extra,
                kv_load_failure_policy=policy,
            ),
        )
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        caches = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        given = {
            "vllm_config": config,
            "kv_cache_config": caches,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": BLOCK,
            "hash_block_size": BLOCK,
            "log_stats": True,
        }
        known = inspect.signature(Scheduler.__init__).parameters
        self.scheduler = kind(**{name: value for name, value in given.items() if name in known})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks

    def add(self, name: str, tokens: list[int], count: int, params: dict[str, Any]) -> Request:
        sampling = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        sampling.update_from_generation_config({}, None)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def blocks(self, name: str) -> list[int]:
        (found,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(found)

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def answer(self, scheduled: Any, tokens: dict[str, int] | None = None, **told: Any) -> Any:
        """The worker's output for a step: one token for each request in `tokens`."""
        names = list(scheduled.num_scheduled_tokens)
        output = EMPTY_MODEL_RUNNER_OUTPUT
        if names or told:
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[
                    [(tokens or {})[name]] if name in (tokens or {}) else [] for name in names
                ],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
        if told:
            output.kv_connector_output = KVConnectorOutput(**told)
        found = self.scheduler.update_from_output(scheduled, output)
        return [one for outputs in found.values() for one in outputs.outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[Scheduler, AsyncScheduler])
def kind(request: pytest.FixtureRequest) -> type[Scheduler]:
    found: type[Scheduler] = request.param
    return found


def test_the_producer_tells_every_chunk_and_keeps_the_blocks(
    model: Path, tmp_path: Path, kind: type[Scheduler]
) -> None:
    engine = Engine(model, "kv_producer", tmp_path, kind)
    before = engine.free()
    prompt = list(range(100, 250))
    engine.add("a", prompt, 1, {"do_remote_decode": True, "ticket": TICKET})
    told = []
    for computed in (64, 128, 150):
        step = engine.schedule()
        facts = step.kv_connector_metadata
        told += [call.tokens for call in facts.calls]
        (chunk,) = facts.chunks
        assert (chunk.computed, chunk.pages) == (computed, engine.blocks("a")[: -(-computed // BLOCK)])
        table = engine.blocks("a")
        outputs = engine.answer(step, {"a": 7} if computed == 150 else None)
    assert told == [150]
    (last,) = outputs
    assert last.new_token_ids == [7]
    assert last.kv_transfer_params["ticket"] == TICKET
    step = engine.schedule()
    (finished,) = step.kv_connector_metadata.finished
    assert (finished.token, finished.computed, finished.pages) == (7, 150, table[:10])
    assert engine.free() == before - len(table)
    assert step.kv_connector_metadata.idle
    assert engine.scheduler.has_requests()
    engine.answer(step, finished_sending={"a"})
    assert engine.free() == before
    assert (
        not engine.scheduler.has_finished_requests() or not engine.schedule().kv_connector_metadata.finished
    )


def test_the_consumer_goes_on_behind_the_first_token(
    model: Path, tmp_path: Path, kind: type[Scheduler]
) -> None:
    engine = Engine(model, "kv_consumer", tmp_path, kind)
    before = engine.free()
    prompt = list(range(100, 131))
    params = {
        "do_remote_prefill": True,
        "ticket": TICKET,
        "remote_host": "127.0.0.1",
        "remote_port": 14579,
        "first_token": "handoff",
    }
    request = engine.add("b", [*prompt, 1], 3, params)
    step = engine.schedule()
    (load,) = step.kv_connector_metadata.loads
    assert not step.num_scheduled_tokens
    assert (load.token_start, load.token_end, load.pages) == (0, 31, engine.blocks("b")[:2])
    engine.answer(step)
    step = engine.schedule()
    assert not step.num_scheduled_tokens
    assert step.kv_connector_metadata.idle
    engine.answer(step, finished_recving={"b"}, kv_connector_worker_meta=WorkerNews({"b": 777}))
    step = engine.schedule()
    assert step.num_scheduled_tokens == {"b": 1}
    (new,) = step.scheduled_new_reqs
    assert new.prompt_token_ids == [*prompt, 777]
    assert new.num_computed_tokens == 31
    # The block that the first token fills has the name of what it holds.
    known = Request(
        request_id="c",
        prompt_token_ids=[*prompt, 777, 5],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_hasher=engine._hasher,
    )
    assert list(request.block_hashes) == list(known.block_hashes)
    tokens = []
    while engine.scheduler.has_unfinished_requests():
        tokens += [one.new_token_ids for one in engine.answer(step, {"b": 40 + len(tokens)})]
        step = engine.schedule()
    assert tokens == [[40], [41], [42]]
    engine.answer(step)
    assert engine.free() == before


def test_a_load_that_failed_ends_its_request_and_its_blocks_wait_for_the_writer(
    model: Path, tmp_path: Path, kind: type[Scheduler]
) -> None:
    engine = Engine(model, "kv_consumer", tmp_path, kind)
    before = engine.free()
    params = {"do_remote_prefill": True, "ticket": TICKET, "remote_host": "127.0.0.1", "remote_port": 14579}
    engine.add("d", list(range(100, 150)), 3, params)
    step = engine.schedule()
    blocks = engine.blocks("d")
    engine.answer(step)
    step = engine.schedule()
    told: dict[str, Any] = {"invalid_block_ids": set(blocks), "finished_recving": {"d"}}
    if versions.tells_failed_requests():
        told["failed_recving"] = {"d"}
    (output,) = engine.answer(step, **told, kv_connector_worker_meta=WorkerNews(held={"d/0": blocks}))
    assert str(output.finish_reason) == "error"
    assert not engine.scheduler.has_unfinished_requests()
    # Nobody is given them, and the core goes on asking, until nobody can write into them any more.
    assert engine.free() == before - len(blocks)
    assert engine.scheduler.has_requests()
    step = engine.schedule()
    assert step.kv_connector_metadata.idle
    engine.answer(step, kv_connector_worker_meta=WorkerNews(quiet={"d/0"}))
    assert engine.free() == before


@pytest.mark.skipif(
    not versions.tells_failed_requests(), reason="this vLLM knows failed loads by their blocks"
)
@pytest.mark.parametrize("token", [None, 777], ids=["first token lost", "first token known"])
def test_a_load_that_failed_is_computed_in_other_blocks(
    model: Path, tmp_path: Path, kind: type[Scheduler], token: int | None
) -> None:
    """And never with a placeholder in the prompt."""
    engine = Engine(model, "kv_consumer", tmp_path, kind, "recompute")
    before, prompt = engine.free(), list(range(100, 150))
    params = {"do_remote_prefill": True, "ticket": TICKET, "remote_host": "127.0.0.1", "remote_port": 14579}
    engine.add("e", [*prompt, 1], 2, params | {"first_token": "handoff"})
    engine.answer(engine.schedule())
    blocks = engine.blocks("e")
    news = WorkerNews(tokens={} if token is None else {"e": token}, held={"e/0": blocks})
    told: dict[str, Any] = {"failed_recving": {"e"}, "finished_recving": {"e"}}
    assert engine.answer(engine.schedule(), **told, kv_connector_worker_meta=news) == []
    outputs: list[Any] = []
    computed = 0
    for _ in range(6):
        step = engine.schedule()
        computed += step.num_scheduled_tokens.get("e", 0)
        if step.num_scheduled_tokens:
            assert not set(blocks) & set(engine.blocks("e"))
        outputs += engine.answer(step, {"e": 40 + len(outputs)})
    if token is None:
        assert (computed, [str(one.finish_reason) for one in outputs]) == (0, ["error"])
    else:
        assert computed == 52
        assert [one.new_token_ids for one in outputs] == [[40], [41]]
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.free() == before - len(blocks)
    engine.answer(engine.schedule(), kv_connector_worker_meta=WorkerNews(quiet={"e/0"}))
    assert engine.free() == before
