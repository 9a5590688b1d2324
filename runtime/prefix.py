# SPDX-License-Identifier: Apache-2.0
"""The name of a full page: a hash over its tokens and those of every page before it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["extend_keys", "namespace"]


def namespace(fingerprint: str, *, adapter: str = "", salt: str = "") -> bytes:
    """What KV depends on besides the tokens, as the key before the first page.

    `fingerprint` is the layout's: model weights, dtype, page size. `salt` keeps apart what a client wants apart.
    """
    parts = [one.encode("utf-8", "surrogatepass") for one in (fingerprint, adapter, salt)]
    # Each with its length, or one part could pass for the end of the other.
    named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(named, digest_size=16).digest()


def extend_keys(keys: list[bytes], first: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int) -> None:
    """Append to `keys` the names of the pages that `tokens` fill, which follow the pages that `keys` names already.

    key[i] = H(key[i-1], tokens of page i), and key[-1] = `first`, a `namespace`. Equal keys mean equal KV.
    """
    before = keys[-1] if keys else first
    data = np.ascontiguousarray(tokens[: len(tokens) // page_tokens * page_tokens], dtype="<u4").tobytes()
    for start in range(0, len(data), 4 * page_tokens):
        before = hashlib.blake2b(before + data[start : start + 4 * page_tokens], digest_size=16).digest()
        keys.append(before)
