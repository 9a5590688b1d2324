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
from transformers import AutoModelForCausalLM

from kit.host_memory import host_cache_over
from kit.tiny_families import FAMILIES, tiny_random_model
from kit.tiny_prompts import VOCABULARY
from kvrail.kernels import linear
from kvrail.runtime.checkpoint import Checkpoint, open_checkpoint
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.messages import Sampling
from kvrail.runtime.model import PagedModel
from kvrail.runtime.page_copier import PageCopier
from kvrail.transfer.pages import PagePool


def save_tiny(folder: Path, name: str, **changes: Any) -> Path:
    torch.manual_seed(list(FAMILIES).index(name))
    changes = {"vocab_size": VOCABULARY, "eos_token_id": [2, 3], "bos_token_id": 1} | changes
    tiny_random_model(name, **changes).save_pretrained(folder)
    return folder


class Rig:
    """An engine with its pool and memory, and the plain way to run it."""

    def __init__(
        self,
        model: PagedModel,
        pages: int,
        slots: int = 8,
        *,
        host_pages: int = 0,
        host_states: int = 8,
        state_interval: int = 1,
        copier: PageCopier | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        layout = model.layout
        slots = slots if layout.state_bytes else 0
        self.pool = PagePool(pages if layout.layers else 0, slots)
        self.memory = bytearray(self.pool.pages * layout.page_bytes)
        self.state = bytearray(slots * layout.state_bytes)
        self.host = None
        if host_pages:
            self.host = host_cache_over(
                self.memory,
                layout,
                self.pool,
                host_pages,
                copier,
                state=self.state if slots else None,
                host_states=host_states,
                state_interval=state_interval,
            )
        self.engine = EmbeddedEngine(
            model,
            self.pool,
            self.memory,
            state_memory=self.state if slots else None,
            host_cache=self.host,
            **options,
        )
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

    def step_quietly(self) -> None:
        """One step whose outputs nobody looks at."""
        self.engine.step()
        self.pool.check()

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

    def poison_free_pages(self) -> None:
        """What nobody owns and no prefix needs may hold anything: NaN."""
        layout, pool = self.model.layout, self.pool
        for page in np.flatnonzero(pool._state == 0).tolist():
            self.memory[page * layout.page_bytes : (page + 1) * layout.page_bytes] = (
                b"\xff" * layout.page_bytes
            )
        for slot in pool._free_states:
            self.state[slot * layout.state_bytes : (slot + 1) * layout.state_bytes] = (
                b"\xff" * layout.state_bytes
            )

    def assert_idle(self) -> None:
        """Nothing is held once everything has ended."""
        self.pool.check()
        assert (self.pool.owned, self.pool.shared, self.pool.quarantined) == (0, 0, 0)
        assert self.pool.free_states == self.pool.state_slots
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
        self._expected: dict[tuple[bytes, int, str], list[int]] = {}

    def _checkpoint(self, kind: str) -> Checkpoint:
        return open_checkpoint(str(save_tiny(self._root / kind, kind)))

    def _load(
        self, kind: str, page_tokens: int = 16, dtype: str = "float32", native: bool = False
    ) -> PagedModel:
        """`native`: as on a CPU that has (or lacks) 16-bit arithmetic, whatever this one is."""
        with mock.patch.object(linear, "has_native_16bit", return_value=native):
            return PagedModel.load(self.checkpoint(kind), dtype, page_tokens)

    def _reference(self, kind: str) -> Any:
        # Eager: some versions of transformers leave Gemma 2's caps out of fused attention.
        return AutoModelForCausalLM.from_pretrained(
            self.checkpoint(kind).folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

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
        key = (prompt.tobytes(), count, kind)
        if key not in self._expected:
            self._expected[key] = self._generate(prompt, count, kind)
        return self._expected[key]

    def _generate(self, prompt: Any, count: int, kind: str) -> list[int]:
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
