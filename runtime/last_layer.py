# SPDX-License-Identifier: Apache-2.0
"""The last layer of a model computes K and V of every token, and all the rest only for tokens that somebody reads.

Of a chunk of a prompt at most the last token's logits are of use. What a layer's own code computes before attention is
run for all tokens and ends when their K and V are stored; then the same code, unchanged, computes the tokens that are
read. So this holds for whatever a family does in its layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvrail.kernels.attention import AttentionPlan, Slice

__all__ = ["ReadRows", "Tail", "read_rows", "spare_last_layer"]

# Of a layer's arguments: what has a row for each token.
_BY_TOKEN = ("position_embeddings", "position_ids")


class ReadRows(NamedTuple):
    """The tokens of a flat batch that are read: the end of each slice, from its first wanted token on."""

    slices: list[Slice]
    rows: np.ndarray[Any, Any]  # int64 [n] where they are in the batch
    wanted: np.ndarray[Any, Any]  # int64 where the wanted ones are among them


class Tail(NamedTuple):
    """What the last layer needs of a step besides its plan.

    `plan` is called when all other layers have used the step's own, which need not be good any longer.
    """

    rows: torch.Tensor  # int64 [n]
    plan: Callable[[], AttentionPlan]


class _Stored(Exception):
    """K and V are where they should be, and nothing else is wanted."""


class _Storing:
    """A plan that ends a layer where it would attend."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.positions = plan.positions
        self._plan = plan

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        self._plan.store(layer, key, value, sliding_window=sliding_window)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        self.store(layer, key, value, sliding_window=sliding_window)
        raise _Stored


def read_rows(slices: Sequence[Slice], wanted: Sequence[int], *, single: bool, least: int) -> ReadRows | None:
    """What is read of a batch whose tokens `wanted` are wanted (one token where none is); None where it is too much.

    That is when fewer than `least` tokens are spared. And, with `single`, when more than the last token of a slice is
    read: for a layer with a window, whose ring holds by then what that token sees.
    """
    ends = np.cumsum([part.length for part in slices])
    if ends[-1] - len(wanted) < least:
        return None
    places = np.unique(np.asarray(wanted if len(wanted) else [ends[-1] - 1], dtype=np.int64))
    # The first wanted token of each slice that has any.
    touched, first = np.unique(np.searchsorted(ends, places, side="right"), return_index=True)
    kept, rows = [], []
    for number, row in zip(touched.tolist(), places[first].tolist(), strict=True):
        part, end = slices[number], int(ends[number])
        count = end - row
        if single and count > 1:
            return None
        kept.append(part._replace(start=part.start + part.length - count, length=count))
        rows.append(np.arange(row, end))
    found = np.concatenate(rows)
    if ends[-1] - len(found) < least:
        return None
    return ReadRows(kept, found, np.searchsorted(found, np.asarray(wanted, dtype=np.int64)))


def spare_last_layer(model: Any) -> None:
    """Have the last decoder layer of `model` understand a keyword `tail` (a Tail, or None: it computes all rows).

    Its output then has those rows only, and so has everything behind it.
    """
    layer: nn.Module = model.get_decoder().layers[-1]
    own = layer.forward

    def forward(hidden_states: torch.Tensor, *others: Any, tail: Tail | None = None, **more: Any) -> Any:
        if tail is None:
            return own(hidden_states, *others, **more)
        with contextlib.suppress(_Stored):
            own(hidden_states, *others, **more | {"plan": _Storing(more["plan"])})
        few = {name: _rows(more[name], tail.rows) for name in _BY_TOKEN if name in more}
        return own(hidden_states.index_select(1, tail.rows), *others, **more | few | {"plan": tail.plan()})

    layer.forward = forward


def _rows(whole: Any, rows: torch.Tensor) -> Any:
    """Those rows of [1, T, …], or of each of several."""
    if isinstance(whole, torch.Tensor):
        return whole.index_select(1, rows)
    return whole if whole is None else tuple(_rows(part, rows) for part in whole)
