# SPDX-License-Identifier: Apache-2.0
"""From settings to a working rank: model, pools, UCX, links, ledger, role; and all of it closed in the right order."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.completion import Completion
from kvrail.runtime.config import LaunchConfig, environment, mps_sign, ucx_overrides
from kvrail.runtime.cuda_memory import free_bytes, gpu_facts, open_cuda, rank_device
from kvrail.runtime.device import Compute
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.grammar import Grammars, tokenizer_text
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.host_cache_build import build_host_cache
from kvrail.runtime.messages import ToFront
from kvrail.runtime.model import PagedModel
from kvrail.runtime.pool_sizes import pool_sizes
from kvrail.runtime.prefilling import Prefilling
from kvrail.runtime.process import RankSpec
from kvrail.transfer.link_events import LinkEvent, LinkOptions, PeerAddress
from kvrail.transfer.links import Links
from kvrail.transfer.memory import Pools
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.sender import Sender
from kvrail.transfer.ucx import open_context, open_reactor

__all__ = ["BuiltRank", "build_rank"]

_log = logging.getLogger(__name__)
# What a PE rank can start soon, as it tells CEs: what is more waits there, or goes to another PE.
_PREFILL_QUEUE = 32
# A CE counts a prefill until its first token, but its ticket lives until its doorbell, and of each other CEs know by
# polls only. So there may be more for a moment; the ledger refuses what is far too much.
_TICKETS_A_PLACE = 4


@dataclass(frozen=True)
class BuiltRank:
    """A rank that is ready to serve."""

    role: Completion | Prefilling
    wake_fds: tuple[int, ...]
    poll_links: Callable[[float], list[LinkEvent]] | None
    address: PeerAddress
    pages: int
    pool_memory: str
    queue_limit: int


@contextlib.contextmanager
def build_rank(spec: RankSpec, incarnation: bytes, send: Callable[[ToFront], None]) -> Iterator[BuiltRank]:
    """Load and connect everything. Raises ConfigError when the settings do not fit the model or the machine."""
    config = spec.config
    if config.resolved_threads is not None:
        torch.set_num_threads(config.resolved_threads)
    # What the machine lacks is said before a model is loaded.
    device = rank_device(config, spec.rank)
    library = config.ucx or environment("KVRAIL_UCX")
    cuda = open_cuda(config, spec.rank, library)
    checkpoint = open_checkpoint(config.model, _log_progress)
    model = PagedModel.load(
        checkpoint,
        config.dtype,
        config.page_tokens,
        _log_progress,
        device=device,
        attention=config.attention,
        cuda_graphs=config.cuda_graphs,
        # A prefill engine never does.
        decodes=config.role != "pe",
    )
    layout = model.layout
    pages, state_slots = pool_sizes(config, layout, free_bytes(device))
    with contextlib.ExitStack() as stack:
        context = open_context(
            config.put_transport,
            config.kv_host,
            library=library,
            overrides=ucx_overrides(),
            cuda=cuda is not None,
        )
        stack.callback(context.close)
        reactor = open_reactor(
            context, spin_us=config.resolved_spin_us, copy_threads=config.copy_threads, cuda=cuda
        )
        stack.callback(reactor.close)
        on_gpu = device != "cpu"
        pools = Pools.allocate(
            context,
            pages=max(1, pages),
            page_bytes=layout.unit_bytes,
            state_slots=state_slots,
            state_bytes=layout.state_bytes,
            cuda=cuda if on_gpu else None,
            pin=None if on_gpu else cuda,
        )
        memory = stack.enter_context(contextlib.ExitStack())
        memory.callback(pools.close)
        # Room for running sequences to grow, whatever tickets are asked for.
        reserve = min(pages, max(1, min(config.resolved_max_num_seqs, pages // 16)))
        pool = PagePool(pages, state_slots, growth_reserve=reserve)
        compute = Compute(model.device)
        host_cache = build_host_cache(
            config, context, layout, pools, pool, memory, gpu=cuda, stream=compute.stream
        )
        grammars = Grammars(functools.partial(tokenizer_text, checkpoint.folder), model.vocab_size)
        stack.callback(grammars.close)
        engine = EmbeddedEngine(
            model,
            pool,
            pools.pages.buffer,
            host_cache=host_cache,
            state_memory=pools.state.buffer if pools.state is not None else None,
            max_model_len=config.max_model_len,
            max_num_seqs=config.resolved_max_num_seqs,
            max_num_batched_tokens=config.resolved_max_num_batched_tokens,
            grammars=grammars,
            compute=compute,
        )
        stack.callback(engine.close)
        if config.max_model_len is not None and engine.max_model_len < config.max_model_len:
            _log.warning(
                "--max-model-len %d: the model and its pages hold %d tokens",
                config.max_model_len,
                engine.max_model_len,
            )
        links: Links | None = None
        if config.role != "single":
            links = Links(
                reactor=reactor,
                identity=(incarnation, spec.rank),
                token=spec.token,
                layout=layout,
                pools=pools,
                options=_link_options(spec),
                accept=config.role == "pe",
                gpu=gpu_facts(cuda, mps_sign()),
            )
            stack.callback(_close_links, links, memory, pools)
        role, queue_limit = _role(
            config, incarnation, spec.rank, engine, pool, pools, links, send, host_cache
        )
        wake_fds = [] if links is None else [links.fileno()]
        if isinstance(role, Completion):
            stack.callback(role.close)
            wake_fds.append(role.wake_fd)
        accepts = links is not None and config.role == "pe"
        yield BuiltRank(
            role=role,
            wake_fds=tuple(wake_fds),
            poll_links=links.poll if links is not None else None,
            address=links.address
            if links is not None and accepts
            else PeerAddress(incarnation, spec.rank, "", 0),
            pages=pages,
            pool_memory=f"cuda ({cuda.name})" if on_gpu and cuda else f"host ({pools.pages.backing})",
            queue_limit=queue_limit,
        )


def _close_links(links: Links, memory: contextlib.ExitStack, pools: Pools) -> None:
    """End the links; what a peer may still write into is left mapped, and goes with this process."""
    if not links.close():
        memory.pop_all()
        pools.leave_open()


def _log_progress(what: str, share: float) -> None:
    _log.info("%s (%.0f %%)", what, 100 * share)


def _link_options(spec: RankSpec) -> LinkOptions:
    config = spec.config
    return LinkOptions(
        socket_dir=Path(spec.socket_dir),
        kv_host=config.kv_host,
        lane=config.lane,
        put_transport=config.put_transport,
        require_lane=config.require_lane,
        heartbeat_s=config.heartbeat_s,
        # A step that takes long is no fault as long as tickets live through it.
        stuck_s=config.ticket_ttl_s,
    )


def _role(
    config: LaunchConfig,
    incarnation: bytes,
    rank: int,
    engine: EmbeddedEngine,
    pool: PagePool,
    pools: Pools,
    links: Links | None,
    send: Callable[[ToFront], None],
    host_cache: HostPrefixCache | None,
) -> tuple[Completion | Prefilling, int]:
    """The role, and how many requests its front may have here at once."""
    if config.role == "pe":
        assert links is not None
        limit = min(config.resolved_max_num_seqs, _PREFILL_QUEUE)
        tickets = _TICKETS_A_PLACE * limit
        sender = Sender(engine.layout, incarnation=incarnation, rank=rank, max_tickets=tickets)
        prefilling = Prefilling(
            engine=engine,
            pool=pool,
            pools=pools,
            links=links,
            sender=sender,
            send=send,
            cache=host_cache,
        )
        return prefilling, limit
    receiver = Receiver(
        pool,
        engine.layout,
        incarnation=incarnation,
        rank=rank,
        link_share=config.link_share,
        ttl_s=config.ticket_ttl_s,
        # A prefill engine answers between two steps: what bounds a step without progress bounds an answer, too.
        busy_s=config.ticket_ttl_s,
    )
    completion = Completion(
        engine=engine,
        pool=pool,
        pools=pools,
        links=links,
        receiver=receiver,
        send=send,
        cache=host_cache,
        verify_share=config.verify_kv,
        # Who has a seat is sure of a state slot, however often it is preempted.
        seats=min(config.resolved_max_num_seqs, pool.state_slots or config.resolved_max_num_seqs),
        largest_ticket=min(int(config.link_share * pool.pages), pool.pages - pool.growth_reserve),
    )
    # A few more than there are seats, so that a seat is taken again as soon as it is free.
    return completion, config.resolved_max_num_seqs + 8
