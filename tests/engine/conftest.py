# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, made on the spot, and an engine over plain memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.host_memory import host_cache_over
from kvrail.kernels import linear
from kvrail.runtime.checkpoint import Checkpoint, open_checkpoint
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.messages import Sampling
from kvrail.runtime.model import PagedModel
from kvrail.runtime.page_copier import PageCopier
from kvrail.transfer.pages import PagePool

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY = 997


def tiny_config(kind: str, **changes: Any) -> Any:
    """Two layers, four heads over two KV heads."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 640,
        "tie_word_embeddings": kind == "llama",
        "eos_token_id": [2, 3],
        "initializer_range": 0.2,
    }
    if kind == "mistral":
        settings["sliding_window"] = None
    return AutoConfig.for_model(kind, **(settings | changes))


def save_tiny(folder: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(FAMILIES.index(kind) if kind in FAMILIES else 9)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    # Biases and norms start as constants, which would hide mistakes in them.
    for name, value in model.named_parameters():
        if value.ndim == 1:
            torch.nn.init.normal_(value, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    return folder


class Rig:
    """An engine with its pool and memory, and the plain way to run it."""

    def __init__(
        self,
        model: PagedModel,
        pages: int,
        *,
        host_pages: int = 0,
        copier: PageCopier | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.pool = PagePool(pages)
        self.memory = bytearray(pages * model.layout.page_bytes)
        self.host = (
            host_cache_over(self.memory, model.layout, self.pool, host_pages, copier) if host_pages else None
        )
        self.engine = EmbeddedEngine(model, self.pool, self.memory, host_cache=self.host, **options)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, StepOutput] = {}
        self.steps: list[list[StepOutput]] = []

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        self.pool.check()
        if self.host is not None:
            self.host.index.check()
        self.steps.append(outputs)
        for output in outputs:
            if output.token is not None:
                self.tokens.setdefault(output.sequence_id, []).append(output.token)
            if output.finish_reason is not None:
                assert output.sequence_id not in self.finished
                self.finished[output.sequence_id] = output
        return outputs

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def generate(self, prompts: Iterable[Any], sampling: Sampling) -> list[list[int]]:
        names = []
        for number, prompt in enumerate(prompts):
            names.append(f"s{number}-{len(self.tokens)}")
            self.engine.add(names[-1], prompt, sampling)
        self.drain()
        return [self.tokens[name] for name in names]

    def assert_idle(self) -> None:
        """Nothing is held once everything has ended."""
        self.pool.check()
        assert (self.pool.owned, self.pool.shared, self.pool.quarantined) == (0, 0, 0)
        assert self.engine.load == {"running": 0, "waiting": 0, "waiting_tokens": 0}
        assert not self.engine.has_work
        if self.host is not None:
            assert self.host.index.pinned == 0


class Models:
    """Checkpoints and loaded models, each made once a session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.checkpoint = cache(self._checkpoint)
        self.load = cache(self._load)
        self.reference = cache(self._reference)

    def _checkpoint(self, kind: str) -> Checkpoint:
        return open_checkpoint(str(save_tiny(self._root / kind, kind)))

    def _load(
        self, kind: str, page_tokens: int = 16, dtype: str = "float32", native: bool = False
    ) -> PagedModel:
        """`native`: as on a CPU that has (or lacks) 16-bit arithmetic, whatever this one is."""
        with mock.patch.object(linear, "has_native_16bit", return_value=native):
            return PagedModel.load(self.checkpoint(kind), dtype, page_tokens)

    def _reference(self, kind: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint(kind).folder, dtype=torch.float32).eval()

    def rig(
        self,
        kind: str = "llama",
        page_tokens: int = 16,
        pages: int = 96,
        dtype: str = "float32",
        native: bool = False,
        **options: Any,
    ) -> Rig:
        return Rig(self.load(kind, page_tokens, dtype, native), pages, **options)

    def expected(self, prompt: Any, count: int, kind: str = "llama") -> list[int]:
        """Greedy tokens of transformers' own generate, with nothing that could end it early."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = self.reference(kind).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=VOCABULARY + 1,
            pad_token_id=0,
        )
        return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def prompt() -> Callable[..., Any]:
    """prompt(length, seed=0): random token ids."""

    def make(length: int, seed: int = 0) -> Any:
        return np.random.default_rng([seed, length]).integers(4, VOCABULARY, length).astype(np.uint32)

    return make


def greedy(max_tokens: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=0, **more)


@pytest.fixture(scope="session", name="greedy")
def greedy_fixture() -> Callable[..., Sampling]:
    return greedy
