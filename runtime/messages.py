# SPDX-License-Identifier: Apache-2.0
"""What a front process and its rank processes say to each other (ZeroMQ over ipc, msgpack).

Token ids travel as one binary field (uint32 LE); outputs go once per step, not per token.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrail.transfer.layout import PageLayout
from kvrail.transfer.wire import TokenLogprob

__all__ = [
    "CACHE_USED",
    "Abort",
    "Accepted",
    "CacheFlushed",
    "CacheUse",
    "Connect",
    "Deferred",
    "Disconnect",
    "Failed",
    "FlushCache",
    "Granted",
    "LinkDropped",
    "LinkReport",
    "Move",
    "Output",
    "Outputs",
    "PeerRank",
    "Prefill",
    "PrefillDone",
    "PrefillFailed",
    "Ready",
    "Sampling",
    "Shutdown",
    "Stats",
    "Stranded",
    "Submit",
    "ToFront",
    "ToRank",
    "decode_to_front",
    "decode_to_rank",
    "encode",
]

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request, with every default resolved. `seed` is always set (drawn by the front if absent).

    `n` answers ("choices") share one prompt; each has a seed of its own, made of `seed` and its number.
    """

    max_tokens: int
    seed: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    # A share of the likeliest token's probability, below which tokens are never drawn.
    min_p: float = 0.0
    # Of tokens in the answer so far; the repetition penalty counts those of the prompt, too.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    # Token ids that end the answer (EOS ids are added by the front unless ignore_eos), from `min_tokens` on.
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    # How many of the likeliest tokens to tell beside each token of the answer, and of the prompt.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # What the answer must be (see runtime/grammar.py; empty: anything), and the tokens that end it where it may end.
    grammar: str = ""
    eos_ids: list[int] = []


class CacheUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request takes part in prefix caching. `use` False: nothing is looked up and nothing is stored for it.

    Only requests of the same `salt` share prefixes.
    """

    use: bool = True
    salt: str = ""


CACHE_USED = CacheUse()


class PeerRank(msgspec.Struct, frozen=True, kw_only=True):
    """One PE rank, as its front describes it to an authenticated CE."""

    incarnation: bytes
    rank: int
    host: str
    port: int
    unix_path: str = ""


# --- front → rank -----------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """CE/single: serve this request. `peer`: prefill on that PE rank (incarnation, rank), or None: prefill here.

    `fallback`: whether this rank may prefill by itself when the remote prefill fails.
    `called`: the front has called that PE ahead of the grant, with this ticket id (from `Granted.next_ticket`), at that
    moment (time.monotonic()). `Granted` with it, `Deferred`, an output of the local route or `Failed` answers.
    """

    request_id: str
    tokens: bytes
    sampling: Sampling
    peer: tuple[bytes, int] | None = None
    called: tuple[bytes, float] | None = None
    fallback: bool = True
    cache: CacheUse = CACHE_USED


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """PE: prefill these tokens for a ticket whose grant comes over the link (before or after this)."""

    request_id: str
    ticket: bytes
    tokens: bytes
    sampling: Sampling
    cache: CacheUse = CACHE_USED


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Drop a request, or only one of its choices (which the front has ended: a stop string)."""

    request_id: str
    reason: str = "cancelled by the client"
    choice: int | None = None


class PrefillFailed(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_failed"):
    """CE: the call to the PE's `/prefill` did not succeed (the PE may or may not have seen it)."""

    request_id: str
    ticket: bytes
    reason: str


class Move(msgspec.Struct, frozen=True, kw_only=True, tag="move"):
    """CE, the answer to `Stranded`: prefill on that PE rank, under a new ticket; None: on none."""

    request_id: str
    peer: tuple[bytes, int] | None


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """CE: keep a link to this PE rank until told otherwise."""

    peer: PeerRank


class Disconnect(msgspec.Struct, frozen=True, kw_only=True, tag="disconnect"):
    incarnation: bytes
    rank: int
    reason: str


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Forget all cached prefixes that nothing uses just now; `CacheFlushed` answers."""

    number: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    pass


ToRank = Submit | Prefill | Abort | PrefillFailed | Move | Connect | Disconnect | FlushCache | Shutdown

# --- rank → front -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank has loaded and serves. `self_rank` tells others how to reach it (PE)."""

    self_rank: PeerRank
    layout: PageLayout
    pages: int
    max_model_len: int
    pool_memory: str
    # Requests beyond this many (running and waiting together) are refused: nothing could start them soon.
    queue_limit: int


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """CE: the ticket is on the link; the front may call the PE's `/prefill` now, unless it has done so.

    `next_ticket`: the id of a ticket to come, with which one request may be called for ahead of its grant; or b"".
    """

    request_id: str
    ticket: bytes
    next_ticket: bytes = b""


class Deferred(msgspec.Struct, frozen=True, kw_only=True, tag="deferred"):
    """CE: no ticket will have the id that this request was called for with; if it gets one, `Granted` tells another."""

    request_id: str


class Stranded(msgspec.Struct, frozen=True, kw_only=True, tag="stranded"):
    """CE: the PE rank of this request will not prefill it, and its ticket, if it had one, is dead. `others`: PE ranks
    that could, which have not been asked yet. `Move` answers. The first token may be out: it stays.
    """

    request_id: str
    reason: str
    others: list[tuple[bytes, int]]


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """PE: the prefill is queued (its grant is here, or expected within the grant deadline)."""

    request_id: str


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice of a request. `route` says where its prompt was prefilled.

    `prompt_logprobs`: those of the next tokens of the prompt, which come before the first token of the answer.
    """

    request_id: str
    tokens: bytes
    finish_reason: FinishReason | None
    route: Literal["remote", "local"]
    cached_tokens: int
    logprobs: list[TokenLogprob] = []
    choice: int = 0
    prompt_logprobs: list[TokenLogprob] = []


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    items: list[Output]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request ended without a good answer. `status` is the HTTP status that it means."""

    request_id: str
    status: int
    reason: str
    retry_after_s: float | None = None


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_done"):
    """PE: the ticket's doorbell (good or failed) is out, or the prefill was refused."""

    request_id: str
    ok: bool
    reason: str = ""
    status: int = 200
    cached_tokens: int = 0
    retry_after_s: float | None = None


class CacheFlushed(msgspec.Struct, frozen=True, kw_only=True, tag="cache_flushed"):
    """The answer to `FlushCache` of that number: pages of the pool and of the host cache that are free now."""

    number: int
    pool_pages: int
    host_pages: int


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """The state of one link, sent at each change. `state`: connecting, up, suspect, down, refused."""

    incarnation: bytes
    rank: int
    state: Literal["connecting", "up", "suspect", "down", "refused"]
    epoch: int = 0
    lane: str = ""
    transport: str = ""
    memory: str = ""
    reason: str = ""
    # (bytes, GB/s, µs, runs of neighbouring units, way) of each probed batch.
    probes: list[tuple[int, float, float, int, str]] = []
    same_host: bool = False
    # That the lane is far slower than the hardware in between ("" when it is not).
    slow: str = ""
    # How many threads of the PE put on it at the same time.
    rails: int = 1


class LinkDropped(msgspec.Struct, frozen=True, kw_only=True, tag="link_dropped"):
    """CE: `Disconnect` has been heard: what was reported of that link before is void, and no more will be."""

    incarnation: bytes
    rank: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and counters of a rank, sent a few times a second and when it goes idle. Names: doc/metrics.md."""

    steps: int
    gauges: dict[str, float]
    counters: dict[str, float]
    # Per link: (peer incarnation hex, rank) → counters.
    links: list[tuple[str, int, dict[str, float]]] = []


ToFront = (
    Ready
    | Granted
    | Deferred
    | Stranded
    | Accepted
    | Outputs
    | Failed
    | PrefillDone
    | CacheFlushed
    | LinkReport
    | LinkDropped
    | Stats
)

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToRank | ToFront) -> bytes:
    """Bytes of a message in either direction."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """A message from the front."""
    return _to_rank.decode(data)


def decode_to_front(data: bytes) -> ToFront:
    """A message from a rank."""
    return _to_front.decode(data)
