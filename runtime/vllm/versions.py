# SPDX-License-Identifier: Apache-2.0
"""What differs between the vLLM versions that the connector is made for (0.26 to 0.33), all of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvrail.runtime.vllm.results import Outcome

__all__ = [
    "VERSION",
    "BlockTracker",
    "Keeper",
    "WorkerMetadata",
    "end_with_error",
    "hand_off_works",
    "log_like_vllm",
    "tells_failed_requests",
    "transfer_results",
    "warn_of_version",
]

_log = logging.getLogger(__name__)
_OLDEST, _NEWEST = (0, 26), (0, 33)
VERSION: str = vllm.__version__

# From 0.31 on a load can fail by the request's name; before, by its blocks.
_Results: Any = getattr(base, "KVConnectorTransferResults", None)
WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", object)


def warn_of_version() -> None:
    """Say so when this vLLM is none that the connector was tried with."""
    numbers = tuple(int(part) for part in VERSION.split("+")[0].split(".")[:2] if part.isdigit())
    if not _OLDEST <= numbers <= _NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (_OLDEST, _NEWEST))
        _log.warning("vLLM %s: KvrailConnector is made for %s to %s", VERSION, oldest, newest)


def log_like_vllm() -> None:
    """Let this project's log lines go where vLLM's go."""
    ours, theirs = logging.getLogger("kvrail"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def hand_off_works() -> bool:
    """Whether workers can tell the scheduler's side a first token."""
    return WorkerMetadata is not object


def transfer_results(outcome: Outcome) -> Any:
    """What `get_transfer_results` returns (0.31 and newer)."""
    return _Results(
        finished_sending=outcome.sent, finished_recving=outcome.received, failed_recving=outcome.failed
    )


def tells_failed_requests() -> bool:
    """Whether failures are told by request, and not by block."""
    return _Results is not None


def end_with_error(request: Any) -> None:
    """Have vLLM (0.31 and newer) end a request with an error that waits, before it computes anything.

    vLLM has no word for that, but ends so a request whose grammar cannot be compiled: this one gets such a grammar.
    """
    grammar = StructuredOutputRequest(params=StructuredOutputsParams(json_object=True))
    grammar.grammar = ValueError("the first token of the answer is not known")
    request.structured_output_request = grammar
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class Keeper:
    """References to blocks in vLLM's pool, as another request would hold them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._kept: dict[str, list[Any]] = {}

    def keep(self, name: str, blocks: list[int]) -> bool:
        """Hold these, which nobody else has been given; False when this vLLM cannot do that."""
        try:
            found = [self._pool.blocks[block] for block in blocks]
            self._pool.touch(found)
        except (AttributeError, TypeError):
            return False
        self._kept[name] = found
        return True

    def let_go(self, name: str) -> None:
        """Give them back."""
        if blocks := self._kept.pop(name, None):
            self._pool.free_blocks(blocks)


class BlockTracker:
    """Block tables of the requests of a step. Newer versions tell them; for older ones they are added up here."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}

    def note(self, output: Any) -> None:
        """A step is scheduled."""
        if getattr(output, "kv_connector_block_state", None) is not None:
            return
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(group) for group in new.block_ids)
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        for at, request_id in enumerate(cached.req_ids):
            again = request_id in resumed if resumed is not None else cached.resumed_from_preemption[at]
            more = cached.new_block_ids[at]
            if again and more is not None:
                self._tables[request_id] = tuple(list(group) for group in more)
            elif more is not None and request_id in self._tables:
                for group, blocks in zip(self._tables[request_id], more, strict=True):
                    group.extend(blocks)
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)

    def of(self, output: Any, request_id: str) -> Sequence[Sequence[int]] | None:
        """Blocks of each KV cache group."""
        state = getattr(output, "kv_connector_block_state", None)
        tables: Sequence[Sequence[int]] | None
        tables = self._tables.get(request_id) if state is None else state.get_block_ids(request_id)
        return tables
