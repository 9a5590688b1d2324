# SPDX-License-Identifier: Apache-2.0
"""Where layer l of page p lies, and the fingerprint that two engines compare before a byte moves."""

from __future__ import annotations

import hashlib

import msgspec

from kvrail.transfer.errors import LayoutMismatch

__all__ = ["PageLayout"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of a page-major pool: array [pages, layers, 2, page_tokens, kv_heads, head_dim], K before V.

    A page holds `page_tokens` tokens of **all** full-attention layers, contiguous in memory. `state_bytes` is
    the size of a sequence's state slot (0: the model has no such state). `model_id` names the weights: two
    engines with different weights have different ids whatever their folders are called.
    """

    model_id: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for one token, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.token_bytes * self.page_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, 2, page_tokens, kv_heads, head_dim]."""
        return (self.layers, 2, self.page_tokens, self.kv_heads, self.head_dim)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when every field is equal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    def require_equal(self, theirs: PageLayout) -> None:
        """Raise LayoutMismatch naming each field in which `theirs` differs."""
        fields = {
            name: (getattr(self, name), getattr(theirs, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(theirs, name)
        }
        if fields:
            raise LayoutMismatch(fields)
