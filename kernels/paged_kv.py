# SPDX-License-Identifier: Apache-2.0
"""KV of full-attention layers in a step: where new rows go in the page pool, and which pages are read."""

from __future__ import annotations

import numpy as np
import torch

from kvrail.kernels.step_parts import Chunk, Singles, Slice, blocks_of, hidden_mask
from kvrail.kernels.upload import upload

__all__ = ["PagedKV"]


class PagedKV:
    """`pool` [P, layers, 2, page_tokens, kv_heads, head_dim]. Queries come in the type of `like`.

    Heads may be narrower than the pool's `head_dim` (keys and values of different width): the rest is never read.
    """

    def __init__(
        self, pool: torch.Tensor, slices: list[Slice], positions: np.ndarray, like: torch.Tensor
    ) -> None:
        self._pool = pool
        self.singles: list[Singles] = []
        self.chunks: list[Chunk] = []
        layers, page_tokens = pool.shape[1], pool.shape[3]
        if not layers:
            # A model whose every layer has a window.
            return
        self._rows = pool.view(-1, pool.shape[4], pool.shape[5])
        written = np.concatenate(
            [np.asarray(s.pages)[np.arange(s.start, s.start + s.length) // page_tokens] for s in slices]
        )
        # Row of (page, layer, k or v, token) in the pool seen as [rows, kv_heads, head_dim].
        first = written * (layers * 2 * page_tokens) + positions % page_tokens
        steps = torch.arange(layers * 2, device=pool.device)[:, None] * page_tokens
        self._targets = upload(pool.device, (first,))[0] + steps
        by_length: dict[int, list[tuple[int, Slice]]] = {}
        row = 0
        for part in slices:
            pages = -(-(part.start + part.length) // page_tokens)
            if part.length == 1:
                # Tables of one group differ by less than a factor of two, so that little padding is read.
                by_length.setdefault(pages.bit_length(), []).append((row, part))
            else:
                (table,) = upload(pool.device, (np.asarray(part.pages[:pages]),))
                blocks = blocks_of(part.start, part.length, None, like)
                self.chunks.append(Chunk(row, row + part.length, table, -1, blocks))
            row += part.length
        self.singles = [self._singles(group, page_tokens) for group in by_length.values()]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V of the step's tokens, [kv_heads, T, dim] each."""
        for side, values in enumerate((key, value)):
            rows = _narrow(self._rows, values.shape[2])
            rows.index_copy_(0, self._targets[2 * layer + side], values.transpose(0, 1).to(rows.dtype))

    def of_chunk(
        self, layer: int, chunk: Chunk, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a chunk sees, [1, kv_heads, positions, dim] each. Only after `store`."""
        k, v = (self._read(layer, side, chunk.units, 1, x.shape[2]) for side, x in enumerate((key, value)))
        return k, v

    def of_singles(
        self, layer: int, group: Singles, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a group sees, [B, kv_heads, positions, dim] each. Only after `store`."""
        batch = len(group.rows)
        k, v = (
            self._read(layer, side, group.units, batch, x.shape[2]) for side, x in enumerate((key, value))
        )
        return k, v

    def _read(self, layer: int, side: int, pages: torch.Tensor, batch: int, dim: int) -> torch.Tensor:
        memory = _narrow(self._pool[:, layer, side], dim)
        return memory.index_select(0, pages).view(batch, -1, memory.shape[2], dim).transpose(1, 2)

    def _singles(self, group: list[tuple[int, Slice]], page_tokens: int) -> Singles:
        lengths = np.array([part.start + 1 for _, part in group])
        width = -(-int(lengths.max()) // page_tokens)
        table = np.empty((len(group), width), dtype=np.int64)
        for line, (_, part) in zip(table, group, strict=True):
            # Its pages behind that are not fit to be read yet.
            used = part.pages[: part.start // page_tokens + 1]
            line[: len(used)] = used
            line[len(used) :] = used[0]
        rows, units = upload(self._pool.device, (np.array([row for row, _ in group]), table.reshape(-1)))
        return Singles(rows, units, hidden_mask(lengths, width * page_tokens, self._pool))


def _narrow(memory: torch.Tensor, dim: int) -> torch.Tensor:
    return memory if memory.shape[-1] == dim else memory[..., :dim]
