# SPDX-License-Identifier: Apache-2.0
"""`KvrailConnector`: vLLM's KV connector interface over the two sides in this folder. doc/vllm.md tells how to use it.

vLLM makes one in its scheduler and one in each worker. Beside `versions.py` this is the only file that imports vLLM.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvrail.runtime.config import ucx_overrides
from kvrail.runtime.control.auth import cluster_token
from kvrail.runtime.vllm import versions
from kvrail.runtime.vllm.engine_facts import block_layout, block_tokens, check_parallel, first_needed
from kvrail.runtime.vllm.gpu_worker import cuda_of, stream_of
from kvrail.runtime.vllm.kv_tensors import TensorView, geometry_of
from kvrail.runtime.vllm.meta import ForScheduler, StepFacts
from kvrail.runtime.vllm.scheduler_side import SchedulerSide
from kvrail.runtime.vllm.service import Memory, Service
from kvrail.runtime.vllm.settings import Settings
from kvrail.runtime.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KvrailConnector", "KvrailMetadata", "WorkerNews"]

_log = logging.getLogger(__name__)


class KvrailMetadata(StepFacts, KVConnectorMetadata):  # type: ignore[misc]
    """StepFacts as vLLM carries them to the workers."""


class WorkerNews(ForScheduler, versions.WorkerMetadata):  # type: ignore[misc]
    """ForScheduler as vLLM carries it to the scheduler's side."""

    def aggregate(self, other: Any) -> WorkerNews:
        """Every tensor-parallel rank tells the same tokens, and has names of its own."""
        return WorkerNews(self.tokens | other.tokens, self.held | other.held, self.quiet | other.quiet)


class KvrailConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Pushes KV from a vLLM that prefills (kv_producer) into the blocks of one that decodes (kv_consumer)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_role, transfer.kv_connector_extra_config)
        self._by_layer = self._settings.role == "pe" and self._settings.push == "layer"
        check_parallel(vllm_config, by_layer=self._by_layer)
        versions.log_like_vllm()
        versions.warn_of_version()
        tokens = block_tokens(kv_cache_config)
        self._by_block: set[int] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._tracker = versions.BlockTracker()
            self._scheduler = SchedulerSide(
                self._settings,
                block_tokens=tokens,
                needed=[first_needed(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups],
                engine_id=str(transfer.engine_id),
                recompute=transfer.kv_load_failure_policy == "recompute",
                end_with_error=versions.end_with_error,
            )
        else:
            self._worker = WorkerSide()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole step would leave out `save_kv_layer`. What it leaves out goes out after the step."""
        return extra_config.get("push") == "layer"

    # --- worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV tensors, once they are allocated: links begin here."""
        config, tensors = self._vllm_config, dict(kv_caches)
        geometry = geometry_of(
            (
                TensorView(
                    name,
                    tensor.untyped_storage().data_ptr(),
                    tensor.data_ptr(),
                    tuple(tensor.shape),
                    tuple(stride * tensor.element_size() for stride in tensor.stride()),
                    tensor.element_size(),
                )
                for name, tensor in tensors.items()
            ),
            self._kv_cache_config.num_blocks,
        )
        parallel = config.parallel_config
        rank = parallel.rank % parallel.tensor_parallel_size
        layers = config.compilation_config.static_forward_context
        layout = block_layout(
            config,
            self._kv_cache_config,
            geometry,
            version=versions.VERSION,
            rank=rank,
            layers={name: layers[name] for name in tensors if name in layers},
        )
        device = next(iter(tensors.values())).device
        cuda, gpu = cuda_of(device, self._settings)
        # Data-parallel engines of one host each have ports of their own.
        replica = getattr(parallel, "data_parallel_rank", 0) or 0
        service = Service(
            self._settings,
            Memory(
                layout,
                geometry,
                [list(group.layer_names) for group in self._kv_cache_config.kv_cache_groups],
                tensors,
                cuda,
                gpu,
            ),
            token=cluster_token(self._settings.token_file, self._settings.runtime_dir),
            rank=rank,
            offset=rank if self._settings.role == "ce" else replica * parallel.tensor_parallel_size + rank,
            ucx_overrides=ucx_overrides(),
            by_request=versions.tells_failed_requests(),
        )
        self._the_worker.start(service)
        _log.info(
            "kvrail: %d KV blocks of %d bytes in %d tensors",
            geometry.blocks,
            layout.page_bytes,
            sum(layout.ranges),
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepFacts):
            self._the_worker.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began with the step's metadata, and land while vLLM goes on."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all of its KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """With `push: layer` this layer's part of the step's blocks goes ahead; else they go out after the step."""
        if self._by_layer:
            self._the_worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass is done, or queued on this thread's CUDA stream."""
        self._the_worker.after_forward(stream_of(self._the_worker.device))

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.31 and newer, where failures are told by request."""
        return versions.transfer_results(self._the_worker.outcome())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Older ones; failures are told by block there."""
        outcome = self._the_worker.outcome()
        self._by_block |= outcome.failed_blocks
        return outcome.sent or None, outcome.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._by_block = self._by_block, set()
        return blocks

    def build_connector_worker_meta(self) -> WorkerNews | None:
        news = self._the_worker.take_news()
        return WorkerNews(news.tokens, news.held, news.quiet) if news else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # --- scheduler --------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._the_scheduler.on_new_request(request)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._the_scheduler.keeper = versions.Keeper(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._the_scheduler.external_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._the_scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._tracker.note(scheduler_output)
        facts = self._the_scheduler.build(
            scheduler_output, lambda request_id: self._tracker.of(scheduler_output, request_id)
        )
        return KvrailMetadata(
            facts.calls,
            facts.chunks,
            facts.finished,
            facts.preempted,
            facts.loads,
            facts.cancelled,
            facts.idle,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        self._the_scheduler.hear(
            sent=connector_output.finished_sending or (),
            received=connector_output.finished_recving or (),
            news=told if isinstance(told, WorkerNews) else ForScheduler(),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._the_scheduler.finished(request, [block_ids])

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._the_scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._the_scheduler.busy

    # --- which of the two this is -----------------------------------------------------------------------------

    @property
    def _the_worker(self) -> WorkerSide:
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    @property
    def _the_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler
