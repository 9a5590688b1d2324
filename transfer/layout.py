# SPDX-License-Identifier: Apache-2.0
"""Where KV lies in pages and state slots, and the fields that two engines compare before a byte moves."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

import msgspec

from kvrail.transfer.errors import LayoutMismatch

__all__ = ["BlockLayout", "Layout", "PageLayout", "TicketLayout", "require_equal"]

_PLACEHOLDER_BYTES = 64
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TicketLayout(Protocol):
    """What the ticket ledgers need to know: how tokens become pages, and their sizes."""

    @property
    def page_tokens(self) -> int:
        """What a ticket begins with is a multiple of this."""
        ...

    @property
    def page_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens, the last of them partly filled perhaps."""
        ...

    def whole_pages(self, tokens: int) -> int:
        """How many of them, from the first on, `tokens` tokens fill, so that they never change again."""
        ...


class PageLayout(msgspec.Struct, frozen=True, kw_only=True, tag="pages"):
    """Geometry of a page-major pool: array [pages, layers, 2, page_tokens, kv_heads, head_dim], K before V.

    A page holds `page_tokens` tokens of **all** full-attention layers, contiguous in memory; `layers` counts those.
    Where keys and values differ in width, `head_dim` is the wider one, and the narrower begins its rows.
    `state_bytes` is the size of a sequence's state slot (0: the model has no such state). It is the ring of the
    `window_layers` sliding-window layers: array [window_layers, 2, window, kv_heads, head_dim], contiguous, with
    token t at place t mod `window`. `model_id` names the weights: two engines with different weights have different
    ids whatever their folders are called.

    A model without full-attention layers has no pages at all: `page_bytes` and `pages_for` are 0.
    """

    model_id: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    state_bytes: int = 0
    window_layers: int = 0
    window: int = 0

    @classmethod
    def with_rings(cls, *, window_layers: int, window: int, **fields: Any) -> PageLayout:
        """A layout (of the other `fields`) whose state slots hold the rings of `window_layers` layers, nothing else."""
        bare = cls(window_layers=window_layers, window=window if window_layers else 0, **fields)
        nbytes = math.prod(bare.ring_shape) * _DTYPE_BYTES[bare.dtype]
        return msgspec.structs.replace(bare, state_bytes=nbytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for one token, all full-attention layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.token_bytes * self.page_tokens

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of the page pool: a page, or where there are none, a placeholder that no ticket names.

        So every link has the same pools, whatever the model.
        """
        return self.page_bytes or _PLACEHOLDER_BYTES

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, 2, page_tokens, kv_heads, head_dim]."""
        return (self.layers, 2, self.page_tokens, self.kv_heads, self.head_dim)

    @property
    def ring_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one state slot: [window_layers, 2, window, kv_heads, head_dim]."""
        return (self.window_layers, 2, self.window, self.kv_heads, self.head_dim)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_tokens) if self.layers else 0

    def whole_pages(self, tokens: int) -> int:
        """How many pages `tokens` tokens fill."""
        return tokens // self.page_tokens if self.layers else 0

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when every field is equal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True, tag="blocks"):
    """KV of another engine, in that engine's own tensors and blocks: `segments` copies of [blocks, unit_bytes].

    A block is `page_tokens` tokens of the layers of one of `groups` groups (of which each has its own blocks); it is a
    segment of `unit_bytes` bytes in each tensor. The groups' pages stand by turns: page i of a ticket is of group
    i mod `groups`. Page 0 of the engine holds nothing, and stands where a group needs no block.

    `order`: "tensor" when the segments of one tensor are neighbours, "block" when those of one block are. `ranges`: how
    many tensors each registered range holds. `facts`: whatever else must be equal for the bytes to mean the same. Of
    `tensor_parallel_size` among them much else follows: where it differs, nothing else is told.
    """

    page_tokens: int
    groups: int
    unit_bytes: int
    ranges: tuple[int, ...]
    order: str
    facts: dict[str, str]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, all tensors."""
        return self.unit_bytes * sum(self.ranges)

    @property
    def state_bytes(self) -> int:
        """There are no state slots."""
        return 0

    def pages_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens, all groups."""
        return -(-tokens // self.page_tokens) * self.groups

    def whole_pages(self, tokens: int) -> int:
        """How many blocks `tokens` tokens fill, all groups."""
        return tokens // self.page_tokens * self.groups


Layout = PageLayout | BlockLayout


_SPREAD = "tensor_parallel_size"


def require_equal(pe: Layout, ce: Layout) -> None:
    """Raise LayoutMismatch naming each field in which the layouts of the two sides differ."""
    mine, other = _fields(pe), _fields(ce)
    names = dict.fromkeys((*mine, *other))
    fields = {name: (mine.get(name), other.get(name)) for name in names if mine.get(name) != other.get(name)}
    if _SPREAD in fields and None not in fields[_SPREAD]:
        fields = {_SPREAD: fields[_SPREAD]}
    if fields:
        raise LayoutMismatch(fields)


def _fields(layout: Layout) -> dict[str, object]:
    found: dict[str, object] = {name: getattr(layout, name) for name in layout.__struct_fields__}
    if isinstance(layout, BlockLayout):
        del found["facts"]
        found |= layout.facts
    return {"kind": layout.__struct_config__.tag} | found
