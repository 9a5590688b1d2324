# SPDX-License-Identifier: Apache-2.0
"""KV of sliding-window layers in a step: a ring of `window` tokens for each sequence, in its state slot.

Token t lies in place t mod window. So the ring of a sequence is a page of `window` tokens with the page pool's own
geometry, and a decoding token, written first, sees exactly what is in it: a ring that has come round has nothing but
the window in it, in an order that attention does not care about. A chunk sees the ring as it was before the chunk,
and its own keys beside it; it is written afterwards. So a ring is as long as the window, however long chunks are.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrail.kernels.step_parts import Chunk, Singles, Slice, blocks_of, hidden_mask
from kvrail.kernels.upload import upload

__all__ = ["RingKV"]


class RingKV:
    """`rings` [slots, windowed layers, 2, window, kv_heads, head_dim]. Queries come in the type of `like`.

    What is not written yet of a slot must be finite (zero): it is hidden by a mask, and NaN would come through.
    """

    def __init__(
        self, rings: torch.Tensor, slices: list[Slice], positions: np.ndarray, like: torch.Tensor
    ) -> None:
        self._rings = rings
        self._flat = rings.view(-1, rings.shape[4], rings.shape[5])
        self.window = rings.shape[3]
        self.singles: list[Singles] = []
        self.chunks: list[Chunk] = []
        device, window = rings.device, self.window
        kept, slots = [], []
        alone: list[tuple[int, Slice]] = []
        row = 0
        for part in slices:
            # Of a chunk that is longer than the window only the end stays; no place is written twice.
            stay = min(part.length, window)
            kept.append(np.arange(row + part.length - stay, row + part.length))
            slots.append(np.full(stay, part.state_slot))
            if part.length == 1:
                alone.append((row, part))
            else:
                earlier = np.arange(max(0, part.start - window + 1), part.start) % window
                blocks = blocks_of(len(earlier), part.length, window, like)
                (units,) = upload(device, (earlier,))
                self.chunks.append(Chunk(row, row + part.length, units, part.state_slot, blocks))
            row += part.length
        rows = np.concatenate(kept)
        self._kept = upload(device, (rows,))[0] if len(rows) < row else None
        layers = rings.shape[1]
        first = np.concatenate(slots) * (layers * 2 * window) + positions[rows] % window
        steps = torch.arange(layers * 2, device=device)[:, None] * window
        self._targets = upload(device, (first,))[0] + steps
        if alone:
            lengths = np.array([min(part.start + 1, window) for _, part in alone])
            places, units = upload(
                device,
                (np.array([row for row, _ in alone]), np.array([part.state_slot for _, part in alone])),
            )
            self.singles.append(Singles(places, units, hidden_mask(lengths, int(lengths.max()), rings)))

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the end of each slice's K and V, [kv_heads, T, dim] each. Overwrites what chunks of this step see."""
        for side, values in enumerate((key, value)):
            new = values if self._kept is None else values.index_select(1, self._kept)
            rows = self._flat[..., : values.shape[2]]
            rows.index_copy_(0, self._targets[2 * layer + side], new.transpose(0, 1).to(rows.dtype))

    def of_chunk(
        self, layer: int, chunk: Chunk, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a chunk sees, [1, kv_heads, positions, dim] each: earlier ones and its own. Before `store`."""
        found = []
        for side, values in enumerate((key, value)):
            ring = self._rings[chunk.slot, layer, side, :, :, : values.shape[2]]
            own = values[:, chunk.first : chunk.last].transpose(0, 1).to(ring.dtype)
            found.append(torch.cat((ring.index_select(0, chunk.units), own)).transpose(0, 1)[None])
        return found[0], found[1]

    def of_singles(
        self, layer: int, group: Singles, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a group sees, [B, kv_heads, places, dim] each. Only after `store`."""
        places = group.mask.shape[3]
        k, v = (
            self._rings[:, layer, side, :places, :, : x.shape[2]].index_select(0, group.units).transpose(1, 2)
            for side, x in enumerate((key, value))
        )
        return k, v
