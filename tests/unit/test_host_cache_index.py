# SPDX-License-Identifier: Apache-2.0
"""Random lives of the host cache's index: no slot in two hands, no parent gone before its child, no wrong hit."""

from __future__ import annotations

import hashlib
import time

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrail.runtime.host_cache_index import Fill, Hit, HostCacheIndex
from kvrail.runtime.prefix import extend_keys, namespace

PAGES, STATES = 9, 3
# Few tokens and short prompts: prefixes are shared all the time.
PROMPT = st.lists(st.integers(0, 1), max_size=7)
PICK = st.integers(0, 99)


def keys_of(prompt: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    for token in prompt:
        keys.append(hashlib.blake2b((keys[-1] if keys else b"") + bytes([token]), digest_size=8).digest())
    return keys


class Index(RuleBasedStateMachine):
    """`content` is what the slots' memory would hold: the key whose page was written there last."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostCacheIndex(PAGES, STATES)
        self.content: dict[int, bytes] = {}
        self.states: dict[int, bytes] = {}
        self.fills: list[tuple[Fill, list[bytes]]] = []
        self.hits: list[tuple[Hit, list[bytes]]] = []

    @rule(prompt=PROMPT, state=st.integers(-1, 6))
    def reserve(self, prompt: list[int], state: int) -> None:
        keys = keys_of(prompt)
        before = self.index.known(keys)
        fill = self.index.reserve(keys, state_place=state)
        if fill is None:
            return
        assert all(place >= before for place in fill.places), "what is there is not written again"
        others = [slot for one, _ in self.fills for slot in one.slots]
        read = [slot for one, _ in self.hits for slot in one.slots]
        assert not set(fill.slots) & {*others, *read}, "a slot that someone else uses"
        for slot in fill.slots:
            self.content.pop(slot, None)
        self.states.pop(fill.state, None)
        self.fills.append((fill, keys))

    @precondition(lambda self: self.fills)
    @rule(pick=PICK, good=st.sampled_from([True, True, True, False]))
    def written(self, pick: int, good: bool) -> None:
        fill, keys = self.fills.pop(pick % len(self.fills))
        if not good:
            self.index.abandon(fill)
            return
        for place, slot in zip(fill.places, fill.slots, strict=True):
            self.content[slot] = keys[place]
        if fill.state >= 0:
            self.states[fill.state] = keys[fill.state_place]
        self.index.commit(fill)

    @rule(prompt=PROMPT, with_state=st.booleans())
    def match(self, prompt: list[int], with_state: bool) -> None:
        keys = keys_of(prompt)
        known = self.index.known(keys)
        hit = self.index.match(keys, with_state=with_state)
        if hit is None:
            assert with_state or not known
            return
        assert len(hit.slots) <= known
        assert with_state or len(hit.slots) == known
        assert (hit.state >= 0) == with_state
        self.hits.append((hit, keys))

    @precondition(lambda self: self.hits)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.index.release(self.hits.pop(pick % len(self.hits))[0])

    @rule()
    def flush(self) -> None:
        self.index.flush()
        assert self.index.used == self.index.pinned

    @invariant()
    def sound(self) -> None:
        self.index.check()
        for hit, keys in self.hits:
            assert [self.content.get(slot) for slot in hit.slots] == keys[: len(hit.slots)], (
                "a pinned page changed"
            )
            if hit.state >= 0:
                assert self.states[hit.state] == keys[len(hit.slots) - 1], "a pinned state changed"

    def teardown(self) -> None:
        while self.fills:
            self.written(0, True)
        while self.hits:
            self.release(0)
        self.sound()
        assert self.index.pinned == 0
        self.index.flush()
        assert (self.index.used, self.index.used_states) == (0, 0)


TestIndex = Index.TestCase


def filled(index: HostCacheIndex, prompt: list[int], state_place: int = -1) -> None:
    fill = index.reserve(keys_of(prompt), state_place=state_place)
    assert fill is not None
    index.commit(fill)


def test_the_end_of_the_oldest_prefix_goes_first() -> None:
    index = HostCacheIndex(6)
    old, new = [0, 0, 0], [1, 1, 1]
    filled(index, old)
    filled(index, new)
    filled(index, [1, 1, 0])
    assert (index.known(keys_of(old)), index.known(keys_of(new))) == (2, 3)
    # Used again, the old prefix is the younger one.
    hit = index.match(keys_of(old))
    assert hit is not None
    index.release(hit)
    filled(index, [1, 0])
    assert (index.known(keys_of(old)), index.known(keys_of(new))) == (2, 2)


def test_the_same_prefix_is_stored_once() -> None:
    index = HostCacheIndex(8)
    first = index.reserve(keys_of([0, 1, 0]))
    assert first is not None
    assert index.match(keys_of([0, 1, 0])) is None, "what is being written cannot be read"
    second = index.reserve(keys_of([0, 1, 0, 1]))
    assert second is not None
    assert second.places == [3]
    assert index.reserve(keys_of([0, 1])) is None
    index.commit(first)
    index.commit(second)
    assert (index.used, index.known(keys_of([0, 1, 0, 1]))) == (4, 4)


def test_everything_pinned_stores_less_and_fails_nothing() -> None:
    index = HostCacheIndex(4)
    filled(index, [0, 0, 0])
    hit = index.match(keys_of([0, 0, 0]))
    fill = index.reserve(keys_of([1, 1, 1]))
    assert hit is not None
    assert fill is not None
    assert fill.places == [0]
    assert index.reserve(keys_of([1, 0])) is None


def test_a_hit_is_cut_down_to_the_last_state() -> None:
    index = HostCacheIndex(8, 2)
    filled(index, [0, 0, 0, 0], state_place=1)
    hit = index.match(keys_of([0, 0, 0, 0]), with_state=True)
    assert hit is not None
    assert (len(hit.slots), hit.state) == (2, 0)
    # Two more states, and one place for them: the pinned state stays.
    filled(index, [1, 1], state_place=1)
    filled(index, [1, 0, 1], state_place=2)
    index.release(hit)
    assert index.match(keys_of([1, 1]), with_state=True) is None
    for kept in ([1, 0, 1], [0, 0, 0, 0]):
        assert index.match(keys_of(kept), with_state=True) is not None


def test_what_stands_on_an_abandoned_page_goes_with_it() -> None:
    index = HostCacheIndex(8)
    bad = index.reserve(keys_of([0, 0]))
    assert bad is not None
    filled(index, [0, 0, 1])
    index.abandon(bad)
    assert (index.known(keys_of([0, 0, 1])), index.used) == (0, 0)
    filled(index, [0, 0, 1])
    index.check()


def test_keys_and_lookup_of_a_long_prompt_are_fast() -> None:
    tokens = np.random.default_rng(0).integers(0, 2**20, 100_000).astype(np.uint32)
    index = HostCacheIndex(2000)
    first: list[bytes] = []
    extend_keys(first, b"model", tokens, 128)
    fill = index.reserve(first)
    assert fill is not None
    index.commit(fill)
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        keys: list[bytes] = []
        extend_keys(keys, b"model", tokens, 128)
        hit = index.match(keys)
        best = min(best, time.perf_counter() - began)
        assert hit is not None
        assert len(hit.slots) == 781
        index.release(hit)
    assert best < 0.002, f"hashing and looking up 100,000 tokens took {best * 1e3:.2f} ms"


def test_namespace_separates_what_differs() -> None:
    names = [
        namespace("aa"),
        namespace("ab"),
        namespace("aa", adapter="x"),
        namespace("aa", salt="x"),
        namespace("aa", adapter="x", salt="y"),
        namespace("aa", adapter="xy"),
    ]
    assert len(set(names)) == len(names)
    assert namespace("aa", salt="x") == namespace("aa", salt="x")
