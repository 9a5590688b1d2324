# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention for steps that are replayed as CUDA graphs: every address and size stays as it is.

The kernels are those of flashinfer_attention.py. They are reached through FlashInfer's module and not through its
wrapper classes: a wrapper has 16 MiB of its own for each batch size, and its `plan` looks at every length in Python
(1.8 ms for 256 sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.fixed_tables import Tables
from kvrail.kernels.flashinfer_attention import FlashInferAttention, as_rows
from kvrail.kernels.kv_store import KvStore
from kvrail.kernels.step_parts import Slice

__all__ = ["FixedAttention", "FixedPlan", "NotFixed", "StepTables"]

# FlashInfer's plan of a batch of any size fits into this.
_PLAN_BYTES = 8 << 20
# Of its codes: no mask or the causal one, and [tokens, heads, dim].
_NON_CAUSAL, _CAUSAL, _NHD = 0, 1, 0
_OTHER = "layers with a window, capped scores, sinks or values of another width"


class NotFixed(RuntimeError):
    """This model or batch size cannot be computed at fixed addresses; the message says why."""


class StepTables(Protocol):
    """The tables of one kind of step: see DecodeTables and PrefillTables."""

    causal: bool

    def host(self, rows: int) -> Tables:
        """The host's side for a step filled up to `rows`."""

    def device(self, rows: int) -> Tables:
        """The device's side: always the same memory."""

    def fill(
        self,
        pool_shape: torch.Size,
        tokens: npt.NDArray[np.int64],
        slices: list[Slice],
        wanted: Sequence[int],
        rows: int,
    ) -> bool:
        """Fill both sides, in the order of the current stream. False when there is not room enough."""


class FixedAttention:
    """Tables, work space and plans for one pool. Plans follow each other on one stream, the last one alone counts."""

    def __init__(
        self, attention: FlashInferAttention, pool: torch.Tensor, tables: StepTables, cache: Path | None
    ) -> None:
        """For steps that `tables` are large enough for. Raises KernelsUnavailable."""
        self._attention = attention
        self._store = KvStore(attention.device.index or 0, cache)
        self._pool_shape = pool.shape
        self.tables = tables
        self._ints = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=attention.device)
        self._pinned_ints = torch.empty(
            _PLAN_BYTES, dtype=torch.uint8, pin_memory=attention.device.type == "cuda"
        )
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(
        self, tokens: npt.NDArray[np.int64], slices: list[Slice], wanted: Sequence[int], rows: int
    ) -> list[int] | None:
        """Give tables and plan of a step, filled up to `rows`, to the current stream; waits for those of the last step.

        Returns what the plan looks like, which depends on `rows` alone. None, with nothing done: too large for the
        tables. Raises NotFixed for a step that the work space is too small for.
        """
        self._copied.synchronize()
        if not self.tables.fill(self._pool_shape, tokens, slices, wanted, rows):
            return None
        host, made = self.tables.host(rows), self._attention
        try:
            plan = made.module.plan(
                made.workspace,
                self._ints,
                self._pinned_ints,
                host.queries,
                host.indptr,
                host.lengths,
                rows,
                len(host.lengths),
                made.heads,
                made.kv_heads,
                self._pool_shape[3],
                True,  # the same launches whatever the lengths are
                made.head_dim,
                made.head_dim,
                self.tables.causal,
                -1,
                -1,
                False,
                0,
            )
        except (RuntimeError, TypeError) as error:
            raise NotFixed(f"FlashInfer cannot plan {rows} rows at fixed addresses: {error}") from error
        self._copied.record()
        return [int(number) for number in plan]

    def plan(self, pool: torch.Tensor, rows: int, shape: list[int]) -> FixedPlan:
        """What computes attention of a step with `rows` rows, whose plan looks like `shape`."""
        return FixedPlan(self, pool, self.tables.device(rows), shape)

    def store(
        self, pool: torch.Tensor, layer: int, tables: Tables, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store K and V of the new tokens, those of rows too many nowhere."""
        self._store(pool, layer, as_rows(key, pool.dtype), as_rows(value, pool.dtype), tables.places)

    def attend(
        self,
        pool: torch.Tensor,
        layer: int,
        tables: Tables,
        shape: list[int],
        query: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend, as StepPlan.attend, with K and V in their places."""
        made = self._attention
        q = as_rows(query, query.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        made.module.paged_run(
            made.workspace,
            self._ints,
            shape,
            q,
            pool[:, layer, 0],
            pool[:, layer, 1],
            tables.queries,
            tables.indptr,
            tables.indices,
            tables.last,
            out,
            None,
            _CAUSAL if self.tables.causal else _NON_CAUSAL,
            _NHD,
            -1,
            False,
            *(None,) * 6,
            0.0,
            scaling,
            1.0,
            1.0,
            0,
        )
        return out


class FixedPlan:
    """One step, as kernels.attention.AttentionPlan: reads its tables when it runs, not when it is made."""

    def __init__(self, made: FixedAttention, pool: torch.Tensor, tables: Tables, shape: list[int]) -> None:
        self.positions = tables.positions
        self.tokens, self.read = tables.tokens, tables.read
        self._made, self._pool, self._tables, self._shape = made, pool, tables, shape

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        """See StepPlan.store. Raises NotFixed, as `attend`."""
        if sliding_window is not None or not key.shape[2] == value.shape[2] == self._pool.shape[-1]:
            raise NotFixed(_OTHER)
        self._made.store(self._pool, layer, self._tables, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See StepPlan.attend. Raises NotFixed for layers that FlashInfer's kernels here do not cover."""
        if softcap is not None or s_aux is not None:
            raise NotFixed(_OTHER)
        self.store(layer, key, value, sliding_window=sliding_window)
        return self._made.attend(self._pool, layer, self._tables, self._shape, query, scaling)
