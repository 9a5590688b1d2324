# SPDX-License-Identifier: Apache-2.0
"""What the front and its vLLM server say to each other, and what the servers of two engines do: msgspec structs.

No vLLM in here: the front reads and writes them as well.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "CARD_ROUTE",
    "PREFILL_ROUTE",
    "STATE_ROUTE",
    "ChildSpec",
    "EngineCard",
    "FirstToken",
    "Logprobs",
    "PeerState",
    "PrefillCall",
    "ServerState",
]

# Under the cluster token, at the front of a prefill engine, and at the port of which its card speaks.
CARD_ROUTE = "/vllm/card"
PREFILL_ROUTE = "/vllm/prefill"
# At the vLLM server behind it, which nobody but its front can reach.
STATE_ROUTE = "/kvrail/state"


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a vLLM server is told at start, as one line on stdin: never on a command line, it holds the cluster token.

    `status_file` is written by the connector, `peers_file` is read by it; both are "" for a single engine. `address`:
    where the connector of a prefill engine listens, host:port; on `call_port` of that host it is called, by TLS when
    there is a certificate. `stuck_s`: after how long without the end of a step an engine core is taken as stuck.
    """

    role: Literal["pe", "ce", "single"]
    token: bytes
    pe_urls: tuple[str, ...] = ()
    ssl_ca_certs: str | None = None
    local_prefill: Literal["auto", "never", "always"] = "auto"
    local_prefill_max_tokens: int = 0
    routing: Literal["affinity", "least-loaded", "prefix"] = "affinity"
    status_file: str = ""
    peers_file: str = ""
    address: str = ""
    call_port: int = 0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    stuck_s: float = 60.0


class EngineCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill engine says of itself. `model` is a digest of the configuration of its model.

    `address`: where its connector listens, host:port; it is called on `call_port` of that host. `load` of at most
    `limit` prefills are there now.
    """

    version: str
    model: str
    address: str
    call_port: int
    incarnation: str
    max_model_len: int
    load: int
    limit: int


class PrefillCall(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill `tokens` (uint32 LE) and sample one token. `ticket`: 16 bytes, or none when the KV stays where it is.

    `sampling`: vLLM's own SamplingParams, encoded by msgpack; `version` and `model` must be those of the callee.
    """

    version: str
    model: str
    ticket: bytes
    tokens: bytes
    sampling: bytes
    cache_salt: str | None = None
    priority: int = 0


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: int32 token ids and float32 values (both [1 + k], the sampled one first)."""

    tokens: bytes
    values: bytes
    rank: int


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a PrefillCall. `stopped`: the token ends the answer by itself (end of text, a stop token)."""

    token: int
    stopped: bool
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    logprobs: Logprobs | None = None


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """A completion engine's view of one prefill engine. `trouble`: why it cannot be used, or "".

    `address`: of its connector, or "" before it was heard of.
    """

    url: str
    trouble: str
    address: str = ""
    load: int = 0
    limit: int = 0


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a vLLM server says of itself to its front. `unsplit`: why it splits no request at all, or "".

    `trouble`: why it can serve nothing now although it answers, or "".
    """

    card: EngineCard
    max_num_seqs: int
    requests: int
    peers: tuple[PeerState, ...] = ()
    unsplit: str = ""
    trouble: str = ""
