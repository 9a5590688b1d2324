# SPDX-License-Identifier: Apache-2.0
"""Paged attention of one step on a GPU through FlashInfer's compiled kernels, which read the pool where it lies.

K and V of a layer are strided views of the page-major pool: nothing is gathered. Each step is planned once, on the
host; a layer then costs one launch that stores its K and V and one or two that attend: leading single tokens as a
decode batch, all other slices as a ragged prefill batch. Layers of another kind (a window, capped scores, sinks)
are torch's, see attention.py.

FlashInfer compiles its kernels with nvcc when they are first wanted and keeps them. FA2 kernels serve both batches;
FA3's would be quicker for long prompts on Hopper, but take minutes to compile.
"""

from __future__ import annotations

import itertools
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrail.kernels.attention import Slice, StepPlan
from kvrail.kernels.upload import stage

__all__ = ["AttentionUnavailable", "FlashInferAttention", "FlashInferPlan", "as_rows"]

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# FlashInfer's own advice is 128 MiB; batches of hundreds of long sequences want more for their partial results.
_WORKSPACE = 256 << 20
_AMPERE = (8, 0)


class AttentionUnavailable(RuntimeError):
    """FlashInfer cannot be used here or for this model; the message says why, and what would help."""


class _Wrappers:
    """FlashInfer's two kinds of batch, and the buffers that they plan in."""

    def __init__(self, library: Any, workspace: torch.Tensor) -> None:
        self.decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self.prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait until the pinned buffers are free: the copies of the plan before may still read them."""
        self._copied.synchronize()

    def end(self) -> None:
        """The plan's copies are queued on the current stream."""
        self._copied.record()


class FlashInferAttention:
    """The attention of one model on one CUDA device: workspaces, compiled kernels, and a plan for each step.

    Plans of one object follow each other on one stream, and only the last one may still be used.
    """

    def __init__(
        self, device: torch.device, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Raises AttentionUnavailable. Compiles nothing yet: see `compile`."""
        self._library = _library(device, head_dim, dtype)
        self.device, self.heads, self.kv_heads, self.head_dim, self.dtype = (
            device,
            heads,
            kv_heads,
            head_dim,
            dtype,
        )
        from flashinfer.jit import gen_batch_prefill_module
        from flashinfer.jit.page import gen_page_module

        # No position encoding, no window, no cap on logits, sums in float32: as the wrappers below ask for.
        kinds = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)
        self._modules = [gen_page_module(), gen_batch_prefill_module("fa2", *kinds)]
        if not self.compiled and not _has_compiler():
            raise AttentionUnavailable(
                "FlashInfer has to compile its kernels once and finds no nvcc: install the CUDA toolkit, or set "
                "CUDA_HOME"
            )
        # All may use the same scratch space: they run one after the other.
        self.workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        # By turns. The host queues a chunk while the device computes the one before, and of the two plans of a long
        # chunk the second, for the last layer, reaches the device at the chunk's end. So the plans of two chunks are
        # under way at once; with fewer sets the host would wait for the device, and then the device for the host.
        self._turns = itertools.cycle([_Wrappers(self._library, self.workspace) for _ in range(4)])
        self.module: Any = None

    @property
    def compiled(self) -> bool:
        """Whether the kernels are there already."""
        return all(module.is_compiled for module in self._modules)

    def compile(self) -> None:
        """Compile what is missing (about half a minute on many cores). Raises AttentionUnavailable.

        Processes that start together wait for one of them.
        """
        try:
            for module in self._modules:
                # The last one has the kernels of attention.
                self.module = module.build_and_load()
        except (RuntimeError, OSError) as error:
            raise AttentionUnavailable(f"FlashInfer's kernels cannot be compiled: {error}") from error

    def plan(
        self, pool: torch.Tensor, slices: list[Slice], dtype: torch.dtype, rings: torch.Tensor | None = None
    ) -> FlashInferPlan:
        """The plan of one step, in the order of the current stream. May wait for an earlier one, four plans before."""
        made = next(self._turns)
        made.begin()
        page_tokens = pool.shape[3]
        starts = np.array([part.start for part in slices], dtype=np.int32)
        lengths = np.array([part.length for part in slices], dtype=np.int32)
        ends = starts + lengths
        pages = -(-ends // page_tokens)
        singles = int((np.cumsum(lengths != 1) == 0).sum())
        rows = np.repeat(np.arange(len(slices), dtype=np.int32), lengths)
        first_rows = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        within = np.arange(len(rows), dtype=np.int32) - first_rows[rows]
        first_pages = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
        table = np.concatenate(
            [part.pages[:count] for part, count in zip(slices, pages.tolist(), strict=True)]
        ).astype(np.int32)
        last = ends - (pages - 1) * page_tokens
        staged = stage(
            self.device,
            (
                starts[rows] + within,
                rows,
                table,
                first_pages,
                last,
                ends,
                first_pages[singles:] - first_pages[singles],
                first_rows[singles:] - first_rows[singles],
            ),
        )
        positions, row_of, indices, indptr, last_there, *_ = staged.device
        host_indptr, host_last, host_ends, later_indptr, later_rows = staged.host[3:]
        common: dict[str, Any] = {"q_data_type": dtype, "kv_data_type": pool.dtype, "sm_scale": 1.0}
        shape = (self.heads, self.kv_heads, self.head_dim)
        if singles:
            made.decode.plan(
                host_indptr[: singles + 1],
                indices[: first_pages[singles]],
                host_last[:singles],
                *shape,
                page_tokens,
                seq_lens=host_ends[:singles],
                **common,
            )
        if singles < len(slices):
            made.prefill.plan(
                later_rows,
                later_indptr,
                indices[first_pages[singles] :],
                host_last[singles:],
                *shape,
                page_tokens,
                causal=True,
                seq_lens=host_ends[singles:],
                **common,
            )
        made.end()
        return FlashInferPlan(
            (pool, slices, dtype, rings),
            positions,
            singles,
            made.decode if singles else None,
            made.prefill if singles < len(slices) else None,
            (self._library.append_paged_kv_cache, row_of, indices, indptr, last_there),
        )


class FlashInferPlan:
    """One step over `pool` [P, layers, 2, page_tokens, kv_heads, head_dim], as kernels.attention.StepPlan."""

    def __init__(
        self,
        step: tuple[torch.Tensor, list[Slice], torch.dtype, torch.Tensor | None],
        positions: torch.Tensor,
        singles: int,
        decode: Any | None,
        prefill: Any | None,
        append: tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        self.positions = positions
        self._step = step
        self._pool = step[0]
        self._singles = singles
        self._decode, self._prefill = decode, prefill
        self._append, self._rows, self._indices, self._indptr, self._last = append

    @cached_property
    def _windowed(self) -> StepPlan:
        """For layers with a window, which keep nothing in pages."""
        pool, slices, dtype, rings = self._step
        return StepPlan(pool[:, :0], slices, dtype, rings)

    @cached_property
    def _other(self) -> StepPlan:
        """For full layers that these kernels do not cover."""
        pool, slices, dtype, _ = self._step
        return StepPlan(pool, slices, dtype)

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        """Store K and V of the new tokens, as StepPlan.store."""
        pool = self._pool
        if sliding_window is not None:
            self._windowed.store(layer, key, value, sliding_window=sliding_window)
        elif key.shape[2] == value.shape[2] == pool.shape[-1]:
            sides = (pool[:, layer, 0], pool[:, layer, 1])
            self._append(
                as_rows(key, pool.dtype),
                as_rows(value, pool.dtype),
                self._rows,
                self.positions,
                sides,
                self._indices,
                self._indptr,
                self._last,
            )
        else:
            self._other.store(layer, key, value)

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
        """Store K and V of the new tokens, then attend: all as StepPlan.attend."""
        width = self._pool.shape[-1]
        plain = softcap is None and s_aux is None and key.shape[2] == value.shape[2] == width
        if sliding_window is not None or not plain:
            plan = self._other if sliding_window is None else self._windowed
            return plan.attend(
                layer,
                query,
                key,
                value,
                scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                s_aux=s_aux,
            )
        self.store(layer, key, value)
        sides = (self._pool[:, layer, 0], self._pool[:, layer, 1])
        q = as_rows(query, query.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        one = self._singles
        # The plan's scale is 1, so that layers may differ in theirs.
        for wrapper, first, last in ((self._decode, 0, one), (self._prefill, one, len(q))):
            if wrapper is not None:
                wrapper.run(q[first:last], sides, q_scale=scaling, out=out[first:last], enable_pdl=False)
        return out


def as_rows(side: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[heads, T, head_dim] as [T, heads, head_dim]: the kernels take any strides but the last one."""
    rows = side.transpose(0, 1).to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _library(device: torch.device, head_dim: int, dtype: torch.dtype) -> Any:
    """The module `flashinfer`, once it is clear that it can serve. Raises AttentionUnavailable."""
    if device.type != "cuda":
        raise AttentionUnavailable(f"FlashInfer needs a CUDA device, not {device}")
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise AttentionUnavailable(f"FlashInfer computes in bfloat16 and float16, not in {name}")
    if head_dim not in HEAD_DIMS:
        raise AttentionUnavailable(f"FlashInfer has no kernels for heads of {head_dim}, only {HEAD_DIMS}")
    if torch.cuda.get_device_capability(device) < _AMPERE:
        raise AttentionUnavailable("FlashInfer needs compute capability 8.0 (Ampere) or later")
    try:
        import flashinfer
    except ImportError as error:
        raise AttentionUnavailable(
            f"FlashInfer is not installed: install kvrail[cuda13] or kvrail[cuda12] ({error})"
        ) from error
    return flashinfer


def _has_compiler() -> bool:
    from flashinfer.jit.cpp_ext import get_cuda_path

    try:
        return (Path(get_cuda_path()) / "bin" / "nvcc").exists() and shutil.which("ninja") is not None
    except RuntimeError:
        return False
