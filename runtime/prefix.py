# SPDX-License-Identifier: Apache-2.0
"""The name of a full page: a hash over its tokens and those of every page before it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["extend_keys"]


def extend_keys(
    keys: list[bytes], namespace: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int, full_pages: int
) -> None:
    """Append to `keys` (those of the first pages of `tokens`) until it names `full_pages` pages.

    key[i] = H(key[i-1], tokens of page i), and key[-1] = `namespace`: what KV depends on besides the tokens
    (weights, dtype, page size). Equal keys mean equal KV.
    """
    for page in range(len(keys), full_pages):
        before = keys[-1] if keys else namespace
        part = np.ascontiguousarray(tokens[page * page_tokens : (page + 1) * page_tokens], dtype="<u4")
        if len(part) != page_tokens:
            raise ValueError(f"page {page} is not full: {len(part)} of {page_tokens} tokens")
        keys.append(hashlib.blake2b(before + part.tobytes(), digest_size=16).digest())
