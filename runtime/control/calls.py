# SPDX-License-Identifier: Apache-2.0
"""What fronts of engines say to each other over HTTP: msgpack bodies, always under the cluster token."""

from __future__ import annotations

import msgspec

from kvrail.runtime.messages import CACHE_USED, CacheUse, PeerRank, Sampling

__all__ = ["MEDIA_TYPE", "CancelCall", "PrefillCall", "RankCard", "RanksReply"]

MEDIA_TYPE = "application/msgpack"


class PrefillCall(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /prefill`: prefill `tokens` (uint32 LE) for a ticket that the CE's rank grants on its link.

    It may be here before its grant. `incarnation` and `rank` name the PE rank that gets the grant; a restarted one
    refuses.
    """

    request_id: str
    ticket: bytes
    incarnation: bytes
    rank: int
    tokens: bytes
    sampling: Sampling
    cache: CacheUse = CACHE_USED


class CancelCall(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /cancel`: stop a prefill. Legal before its `/prefill`, after its end, and twice."""

    request_id: str
    incarnation: bytes
    rank: int
    reason: str


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """One ready PE rank: how to reach it, how many prefills it has, and how many it takes."""

    peer: PeerRank
    load: int
    limit: int


class RanksReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /ranks`: the ranks that can take prefills now."""

    model: str
    ranks: list[RankCard]
