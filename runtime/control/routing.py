# SPDX-License-Identifier: Apache-2.0
"""Which completion rank serves a request, and where its prompt is prefilled. Pure functions of what is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from kvrail.runtime.errors import Unavailable

__all__ = [
    "MOST_ASKED",
    "PeerKey",
    "PeerView",
    "Policy",
    "RankView",
    "Route",
    "affinity_key",
    "another",
    "choose",
    "rendezvous",
]

PeerKey = tuple[bytes, int]
Policy = Literal["affinity", "least-loaded", "prefix"]
# A prompt is asked of so many prefill ranks at most: one that kills its engine must not kill them all.
MOST_ASKED = 3
# Requests that whoever holds a prefix may have more than the idlest: beyond, waiting costs more than computing anew.
_MORE_LOAD = 4


class RankView(NamedTuple):
    """A ready completion rank: requests that it has, how many it takes, and its links that are up.

    `links_silent`: links that may come back soon. `held`: pages of this prompt that it is thought to have cached.
    """

    rank: int
    load: int
    limit: int
    links_up: frozenset[PeerKey] = frozenset()
    links_silent: frozenset[PeerKey] = frozenset()
    held: int = 0


class PeerView(NamedTuple):
    """A prefill rank. `name` is stable over restarts (URL and rank), so its conversations come back to it."""

    key: PeerKey
    name: str
    url: str
    load: int
    limit: int
    held: int = 0


class Route(NamedTuple):
    """The decision: completion rank, and prefill rank or None (prefill here)."""

    rank: int
    peer: PeerView | None


_View = TypeVar("_View", RankView, PeerView)


def affinity_key(text: str) -> bytes:
    """What all turns of one conversation have in common: a hash of its first user message."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def rendezvous(key: bytes, names: Sequence[str]) -> list[int]:
    """Indices of `names`, best first. A name that goes away moves only the keys that had it first."""
    return sorted(
        range(len(names)),
        key=lambda n: hashlib.blake2b(names[n].encode(), key=key, digest_size=8).digest(),
    )


def choose(
    *,
    policy: Policy,
    affinity: bytes,
    ranks: Sequence[RankView],
    peers: Sequence[PeerView],
    local_prefill: Literal["auto", "never", "always"],
    short: bool,
) -> Route | None:
    """The route of one request, or None when everything that could take it is full or silent at present.

    `short`: the prompt is so short that `auto` prefills it here. Raises Unavailable when nothing could take it
    even if it waited: no rank is ready, or local prefill is forbidden and no link is up or may come back soon.
    """
    if not ranks:
        raise Unavailable("no rank is ready yet", retry_after_s=1.0)
    linked = [view for view in ranks if any(peer.key in view.links_up for peer in peers)]
    if local_prefill == "always" or (local_prefill == "auto" and (short or not linked)):
        rank = _pick(policy, affinity, ranks, [f"rank {view.rank}" for view in ranks])
        return None if rank is None else Route(rank.rank, None)
    if not linked:
        if any(peer.key in view.links_silent for view in ranks for peer in peers):
            return None
        raise Unavailable("no prefill engine is connected, and --local-prefill is never", retry_after_s=1.0)
    # A rank whose every linked prefill rank is full must not hide one that has room.
    linked = [view for view in linked if any(p.key in view.links_up and p.load < p.limit for p in peers)]
    rank = _pick(policy, affinity, linked, [f"rank {view.rank}" for view in linked])
    if rank is None:
        return None
    reachable = [peer for peer in peers if peer.key in rank.links_up]
    peer = _pick(policy, affinity, reachable, [view.name for view in reachable])
    return None if peer is None else Route(rank.rank, peer)


def another(
    *, policy: Policy, affinity: bytes, others: Sequence[PeerView], lost: PeerView, full: bool
) -> PeerView | None:
    """Which of `others` prefills what `lost` does not, or None. `full`: one without room is better than none.

    Other engines come before other ranks of the same one: what ended one rank may have ended all.
    """
    for group in (
        [view for view in others if view.url != lost.url],
        [view for view in others if view.url == lost.url],
    ):
        if found := _pick(policy, affinity, group, [view.name for view in group]):
            return found
    return min(others, key=lambda view: view.load, default=None) if full else None


def _pick(policy: Policy, affinity: bytes, views: Sequence[_View], names: Sequence[str]) -> _View | None:
    """The first in the affinity order that has room; the other policies use that order only to break ties."""
    open_ = [views[n] for n in rendezvous(affinity, names) if views[n].load < views[n].limit]
    if not open_ or policy == "affinity":
        return open_[0] if open_ else None
    idlest = min(open_, key=lambda view: view.load)
    if policy == "prefix":
        holder = max(open_, key=lambda view: (view.held, -view.load))
        if holder.held and holder.load <= idlest.load + _MORE_LOAD:
            return holder
    return idlest
