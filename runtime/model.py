# SPDX-License-Identifier: Apache-2.0
"""transformers model code over our pages and rings: one flat batch in, logits of chosen tokens out.

The model's own forward runs unchanged; its attention arrives in `_paged_attention` through the attention-function
registry, with this step's plan as an extra keyword. Matrix products are replaced by quicker ones with the same
meaning where a CPU needs it, norms on a GPU. A self-check at load compares the result with the untouched model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from kvrail.kernels.attention import AttentionPlan, Planner, Slice, StepPlan
from kvrail.kernels.compiled import KernelsUnavailable
from kvrail.kernels.elementwise import Elementwise
from kvrail.kernels.flashinfer_attention import AttentionUnavailable, FlashInferAttention
from kvrail.kernels.fused import fuse_layers, fuse_norms
from kvrail.kernels.linear import activation_dtype, swap_modules
from kvrail.kernels.upload import upload
from kvrail.runtime.architectures import has_experts, layer_windows, shrunk_window
from kvrail.runtime.checkpoint import Checkpoint, Progress, cache_dir
from kvrail.runtime.config import Attention, keep_compiled_attention
from kvrail.runtime.device import device_name, open_device, out_of_memory
from kvrail.runtime.drawn_weights import drawn_model, drawn_seed
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.last_layer import Tail, read_rows, spare_last_layer
from kvrail.runtime.layer_parts import Stored, StoredPlan
from kvrail.runtime.step_graphs import StepGraphs
from kvrail.transfer.layout import PageLayout

__all__ = ["PagedModel", "pool_tensor", "ring_tensor"]

_log = logging.getLogger(__name__)
_ATTENTION = "kvrail_paged"
_CHECK_PAGE_TOKENS = 16
# Shorter than the check's chunks, and than its prompts.
_CHECK_WINDOW = 7
# Root-mean-square difference of logits, relative to their spread, between our batch and the model by itself.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.05}
# The same with experts in 16 bits: rounding sends tokens near a tie to other experts, in a right engine as well. Logits
# that have nothing to do with each other differ by 1.4.
_TOLERANCE_EXPERTS = 0.9
# So many tokens that nobody reads are worth the second plan of a step and a few launches; on a CPU any are.
_LEAST_SPARED = {"cpu": 1, "cuda": 512}


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    places: Sequence[int],
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer: [1, heads, T, dim] → [1, T, heads, dim].

    `places`: the place of each layer among those of its kind (full, or sliding-window).
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = plan.attend(
        places[layer],
        query[0],
        key[0],
        value[0],
        scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )
    return out[None], None


def pool_tensor(memory: Any, pages: int, layout: PageLayout) -> torch.Tensor:
    """The pool [pages, layers, 2, page_tokens, kv_heads, head_dim] over `memory`, without a copy.

    `memory` is any writable buffer, or (GPU memory) an object with `__cuda_array_interface__` of bytes.
    """
    return _tensor(memory, (pages, *layout.shape), layout)


def ring_tensor(memory: Any, slots: int, layout: PageLayout) -> torch.Tensor:
    """State slots [slots, window_layers, 2, window, kv_heads, head_dim], as pool_tensor."""
    return _tensor(memory, (slots, *layout.ring_shape), layout)


def _tensor(memory: Any, shape: tuple[int, ...], layout: PageLayout) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    count = math.prod(shape)
    if hasattr(memory, "__cuda_array_interface__"):
        bytes_of = torch.as_tensor(memory)
        if bytes_of.data_ptr() != memory.__cuda_array_interface__["data"][0]:
            raise ValueError("this GPU memory cannot be used without a copy")
        return bytes_of[: count * dtype.itemsize].view(dtype).view(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class PagedModel:
    """A loaded model. `layout` is the page geometry that its pool must have; `arithmetic` says how it computes."""

    def __init__(
        self,
        model: Any,
        layout: PageLayout,
        attention: Attention = "auto",
        progress: Progress | None = None,
        *,
        cuda_graphs: bool = True,
        decodes: bool = True,
    ) -> None:
        """Take over `model`, which lies on the device that it is to compute on. `decodes`: whether it ever will."""
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _paged_attention)
        self.layout = layout
        windows = layer_windows(model.config)
        kinds = [window is None for window in windows]
        self._places = [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]
        self.vocab_size = int(model.config.vocab_size)
        self.max_model_len = int(model.config.max_position_embeddings)
        self._model: Any = model
        self._model.eval()
        self._model.set_attn_implementation(_ATTENTION)
        spare_last_layer(self._model)
        self._ends_in_window = not kinds[-1]
        self._least_spared = 1
        self.device: torch.device = model.device
        dtype = getattr(torch, layout.dtype)
        compiled, name = _attention(attention, self.device, layout, model.config, progress)
        self._plan: Planner = StepPlan if compiled is None else compiled.plan
        self._graphs: StepGraphs | None = None
        if cuda_graphs and compiled is not None and _capturable(model.config, windows):
            self._graphs = StepGraphs(compiled, self._captured, self.vocab_size, cache_dir(), decodes=decodes)
        if self.device.type == "cpu":
            self._activations = activation_dtype(dtype)
            self.arithmetic = swap_modules(self._model, dtype)
            if self._activations == torch.float32:
                fuse_norms(self._model)
        else:
            self._activations = dtype
            # Equality with a CPU, and of two engines, is promised in float32: no sums of 10-bit mantissas.
            torch.set_float32_matmul_precision("highest")
            self._fuse(dtype, plain=all(window is None for window in windows))
            self.arithmetic = f"{layout.dtype} on {device_name(self.device)}, {name}"
        _log.info("arithmetic: %s", self.arithmetic)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: str,
        page_tokens: int,
        progress: Progress | None = None,
        *,
        device: str = "cpu",
        attention: Attention = "auto",
        cuda_graphs: bool = True,
        decodes: bool = True,
    ) -> PagedModel:
        """Load the weights and check the result. Raises ConfigError when they cannot be loaded or compute wrongly."""
        layout = checkpoint.layout(dtype, page_tokens)
        place = open_device(device)
        if progress:
            progress("loading the weights", 0.0)
        try:
            model = _load_weights(checkpoint, layout.dtype, place)
            if progress:
                progress("checking the model", 0.8)
            with shrunk_window(model, _CHECK_WINDOW):
                expected = _own_logits(model, _check_prompts(model))
                paged = cls(model, layout, attention, progress, cuda_graphs=cuda_graphs, decodes=decodes)
                paged._check(expected)
                paged._least_spared = _LEAST_SPARED[paged.device.type]
        except torch.OutOfMemoryError as error:
            remedy = "use a GPU with more free memory, a smaller model or --dtype bfloat16"
            raise ConfigError(out_of_memory(place, "loading the model", remedy)) from error
        if progress:
            progress("the model is loaded", 1.0)
        return paged

    def _fuse(self, dtype: torch.dtype, plain: bool) -> None:
        """Fewer and larger kernels. In float32 only what gives the same numbers; `plain`: no layer has a window."""
        kernels = None
        if dtype != torch.float32:
            try:
                kernels = Elementwise(self.device.index or 0, dtype, cache_dir())
            except KernelsUnavailable as error:
                _log.warning("layers are computed piece by piece: %s", error)
        fuse_norms(self._model, kernels)
        if kernels is not None and plain:
            fuse_layers(self._model, _paged_attention, kernels)

    def prepare_steps(self, pool: torch.Tensor, sequences: int, sequence_pages: int) -> None:
        """Get ready for steps of up to `sequences` sequences of at most `sequence_pages` pages over `pool`.

        Where there is nothing to get ready, and for another pool, `forward` serves all the same, more slowly.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.prepare(pool, sequences, sequence_pages)

    def forward(
        self,
        pool: torch.Tensor,
        tokens: np.ndarray[Any, Any],
        slices: list[Slice],
        wanted: Sequence[int],
        rings: torch.Tensor | None = None,
        stored: Stored | None = None,
    ) -> torch.Tensor:
        """Compute the new tokens of each slice into pages and rings; return logits [len(wanted), vocabulary], float32.

        tokens [T] in the order of the slices; `wanted` are indices into them. `rings`: see ring_tensor; needed by
        models with sliding-window layers. `stored` is told nothing of a step that is one CUDA graph. The logits are
        good until the next call.
        """
        with torch.inference_mode():
            if self._graphs is not None and rings is None:
                logits = self._graphs.run(pool, tokens, slices, wanted)
                if logits is not None:
                    return logits
            plan = self._plan(pool, slices, self._activations, rings)
            if stored is not None:
                plan = StoredPlan(plan, stored)
            flat = tokens.astype(np.int64)
            read = read_rows(slices, wanted, single=self._ends_in_window, least=self._least_spared)
            if read is None:
                ids, kept = upload(pool.device, (flat, np.asarray(wanted, dtype=np.int64)))
                return self._logits(ids, plan, kept).float()
            ids, kept, rows = upload(pool.device, (flat, read.wanted, read.rows))
            tail = Tail(rows, lambda: self._plan(pool, read.slices, self._activations, rings))
            return self._logits(ids, plan, kept, tail).float()

    def _captured(self, ids: torch.Tensor, plan: AttentionPlan, read: torch.Tensor | None) -> torch.Tensor:
        # 0: of all tokens.
        return self._logits(ids, plan, 0 if read is None else read)

    def _logits(
        self, ids: torch.Tensor, plan: AttentionPlan, kept: torch.Tensor | int, tail: Tail | None = None
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids[None],
            position_ids=plan.positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=kept,
            plan=plan,
            places=self._places,
            tail=tail,
        ).logits[0]
        return logits

    def _check(self, expected: torch.Tensor) -> None:
        """Raise ConfigError unless a flat paged batch gives `expected`, the model's own logits.

        Two random sequences in uneven chunks, side by side, over scattered pages; single tokens at the end. Windows are
        shrunk, so that a chunk is longer than the window, and one begins behind it. Steps that have CUDA graphs are
        checked launched as well.
        """
        found = [self._check_logits(graphs=False)]
        if self._graphs is not None:
            found.append(self._check_logits(graphs=True))
        spread = expected.std().clamp_min(1e-6)
        differences = [float((one - expected).square().mean().sqrt() / spread) for one in found]
        tolerance = _TOLERANCE[self.layout.dtype]
        if has_experts(self._model.config) and self.layout.dtype != "float32":
            tolerance = _TOLERANCE_EXPERTS
        if not all(difference <= tolerance for difference in differences):
            raise ConfigError(
                f"self-check failed: the {self._model.config.model_type} model over pages differs from its own "
                f"attention by {max(differences):.3g} of the logits' spread; this model cannot be served rightly"
            )

    def _check_logits(self, *, graphs: bool) -> torch.Tensor:
        """What the check compares; steps are captured beforehand, or launched."""
        page_tokens = _CHECK_PAGE_TOKENS
        prompts = _check_prompts(self._model)
        tables = [[3, 1], [2]]
        window = min(self.layout.window, _CHECK_WINDOW)
        small = msgspec.structs.replace(self.layout, page_tokens=page_tokens, window=window)
        like = torch.empty(0, dtype=getattr(torch, self.layout.dtype), device=self.device)
        pool = like.new_zeros(4, *small.shape)
        rings = like.new_zeros(3, *small.ring_shape) if small.window_layers else None
        if graphs:
            self.prepare_steps(pool, 2, len(pool))
        done = [0, 0]
        found = like
        for counts in ((5, 1), (page_tokens - 5, 9), (6, 0), (1, 1)):
            active = [i for i in range(2) if counts[i]]
            tokens = np.concatenate([prompts[i][done[i] : done[i] + counts[i]] for i in active])
            slices = [Slice(tables[i], done[i], counts[i], 2 - i) for i in active]
            ends = np.cumsum([counts[i] for i in active]) - 1
            try:
                found = self.forward(pool, tokens, slices, ends.tolist(), rings)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"self-check failed: the {self._model.config.model_type} model cannot be computed over pages "
                    f"with this version of transformers: {error}"
                ) from error
            done = [done[i] + counts[i] for i in range(2)]
        return found.clone()


def _check_prompts(model: Any) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.integers(0, model.config.vocab_size, n) for n in (_CHECK_PAGE_TOKENS + 7, 11)]


def _own_logits(model: Any, prompts: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Logits behind each prompt by the unchanged model, one whole sequence at a time."""
    with torch.inference_mode():
        rows = [
            model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[0, -1]
            for ids in upload(model.device, prompts)
        ]
        return torch.stack(rows).float()


def _load_weights(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """The model as transformers has it, on `device`."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # Progress is the caller's to show.
    disable_progress_bar()
    try:
        if (seed := drawn_seed(checkpoint.folder)) is not None:
            return drawn_model(checkpoint.config, getattr(torch, dtype), device, seed)
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        return model.eval().to(device)
    except torch.OutOfMemoryError:
        raise  # A RuntimeError as well, but nothing is wrong with the weights.
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the weights in {checkpoint.folder} cannot be loaded: {error}") from error


def _attention(
    wanted: Attention, device: torch.device, layout: PageLayout, config: Any, progress: Progress | None
) -> tuple[FlashInferAttention | None, str]:
    """The compiled attention (None: torch's), and what it is called. Raises ConfigError when `wanted` cannot be had."""
    if wanted == "torch" or (wanted == "auto" and device.type == "cpu"):
        return None, "torch attention"
    keep_compiled_attention(cache_dir())
    try:
        found = FlashInferAttention(
            device,
            heads=config.num_attention_heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=getattr(torch, layout.dtype),
        )
        if not found.compiled and progress:
            progress("compiling attention kernels (about half a minute, once)", 0.8)
        found.compile()
    except AttentionUnavailable as error:
        if wanted == "flashinfer":
            raise ConfigError(f"--attention flashinfer: {error}") from error
        _log.warning("attention is torch's own, which is much slower in 16 bits: %s", error)
        return None, "torch attention"
    return found, "FlashInfer attention"


def _capturable(config: Any, windows: Sequence[int | None]) -> bool:
    """Whether a decoding step is the same kernels for whatever tokens.

    Layers with a window or capped scores are torch's, over tables as long as the batch makes them. Which experts
    compute what is decided on the host.
    """
    capped = getattr(config, "attn_logit_softcapping", None)
    return not (has_experts(config) or capped or any(window is not None for window in windows))
