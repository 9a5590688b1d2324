# SPDX-License-Identifier: Apache-2.0
"""What the parts of one vLLM server share: who it is, what it has to do, and on a completion engine its splitter."""

from __future__ import annotations

import secrets
import ssl
from pathlib import Path
from typing import Any

from kvrail.runtime.control.kept_connections import KeptConnections
from kvrail.runtime.vllm.compat import model_digest
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.core_watch import CoreWatch
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.peers import PeerCalls
from kvrail.runtime.vllm.spec import ChildSpec, EngineCard, PrefillCall, ServerState
from kvrail.runtime.vllm.splitting import RequestSplitter

__all__ = ["ServerSide"]

# Prefills that may be here for each sequence that runs: enough that the next is there when one ends.
_QUEUED_PER_SEQUENCE = 2


class ServerSide:
    """Made when vLLM makes its core client, in the event loop in which everything runs."""

    def __init__(self, spec: ChildSpec, tap: CoreTap, config: Any, version: str) -> None:
        self.counters = SplitCounters()
        # Prefill calls that have not been answered.
        self.load = 0
        # Why nobody can call this prefill engine although its core is well, or "".
        self.uncallable = ""
        self._spec = spec
        self._version = version
        self._model = model_digest(config)
        self._incarnation = secrets.token_bytes(16).hex()
        self.max_model_len: int = config.model_config.max_model_len
        self._max_num_seqs: int = config.scheduler_config.max_num_seqs
        self._peers: PeerCalls | None = None
        self._splitter: RequestSplitter | None = None
        # Any question will do: the loop answers this one without asking the workers.
        self.core = CoreWatch(tap.is_sleeping_async, spec.stuck_s)
        tap.side = self
        if spec.role == "ce":
            self._split(tap, config)

    @staticmethod
    def of(tap: CoreTap) -> ServerSide:
        """The side that belongs to a tap."""
        assert isinstance(tap.side, ServerSide)
        return tap.side

    def _split(self, tap: CoreTap, config: Any) -> None:
        spec = self._spec
        trust = ssl.create_default_context(cafile=spec.ssl_ca_certs)
        self._peers = PeerCalls(
            spec.pe_urls,
            spec.token,
            KeptConnections(trust),
            trust,
            self.counters,
            version=self._version,
            model=self._model,
            routing=spec.routing,
            status_file=Path(spec.status_file),
            peers_file=Path(spec.peers_file),
        )
        self._peers.start()
        self._splitter = tap.splitter = RequestSplitter(
            tap,
            config,
            self._peers,
            self.counters,
            local_prefill=spec.local_prefill if spec.pe_urls else "always",
            short=spec.local_prefill_max_tokens,
        )

    def state(self, client: Any) -> ServerState:
        """What the front is told."""
        card = EngineCard(
            version=self._version,
            model=self._model,
            address=self._spec.address,
            call_port=self._spec.call_port,
            incarnation=self._incarnation,
            max_model_len=self.max_model_len,
            load=self.load,
            limit=self._max_num_seqs * _QUEUED_PER_SEQUENCE,
        )
        return ServerState(
            card=card,
            max_num_seqs=self._max_num_seqs,
            requests=client.output_processor.get_num_unfinished_requests() + self.load,
            peers=self._peers.states if self._peers is not None else (),
            unsplit=self._splitter.unsplit if self._splitter is not None else "",
            trouble=self.core.trouble or self.uncallable,
        )

    def why_refused(self, call: PrefillCall, tokens: int) -> tuple[int, str] | None:
        """Status and reason why a call cannot be taken."""
        if self._spec.role != "pe":
            return 404, "this is no prefill engine"
        if call.version != self._version:
            return 409, f"this engine runs vLLM {self._version}, and the caller {call.version}"
        if call.model != self._model:
            return 409, "this engine serves another model, or the same in another number type"
        if not 0 < tokens < self.max_model_len:
            return 400, f"the prompt has {tokens} tokens; it may have {self.max_model_len - 1} at most"
        if self.core.trouble:
            return 503, self.core.trouble
        if self.load >= self._max_num_seqs * _QUEUED_PER_SEQUENCE:
            return 429, f"{self.load} prefills are here already"
        return None
