# SPDX-License-Identifier: Apache-2.0
"""Servers that several files of process tests share. Each kind is started on first use and stopped at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kit.cluster import Server, serving
from kit.split import Split, start_single, start_split, wait_for_links
from kit.tiny_checkpoint import first_tokens, tiny_checkpoint, write_eos

# Their greedy answers begin, and go on, with tokens that end an answer: see `models`.
EOS_AT_1 = tuple(range(300, 340))
EOS_AT_3 = tuple(range(700, 720))


# Family, page size and flags of the split on each lane.
KINDS: dict[str, tuple[str, int, Sequence[str]]] = {
    # Prompts longer than the token budget are prefilled in chunks, and pushed chunk by chunk.
    "shm": ("llama", 16, ("--max-num-batched-tokens", "64")),
    "put/cma": ("qwen3", 128, ("--lane", "put", "--max-num-batched-tokens", "100")),
    "put/tcp": ("llama", 16, ("--lane", "put", "--put-transport", "tcp")),
    "stream": ("llama", 16, ("--lane", "stream", "--max-num-batched-tokens", "64")),
}


class Cluster:
    """Splits by lane, and the single engines to compare them with, by family."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._models: dict[str, Path] = {}
        self._singles: dict[str, Server] = {}
        self._splits: dict[str, Split] = {}

    def model(self, family: str) -> Path:
        """A tiny checkpoint; EOS_AT_1 and EOS_AT_3 make it end its answer at the first and third token."""
        if family not in self._models:
            folder = tiny_checkpoint(self._folder / family, family)
            ends = {first_tokens(folder, EOS_AT_1, 1)[-1], first_tokens(folder, EOS_AT_3, 3)[-1]}
            write_eos(folder, sorted({2, *ends}))
            self._models[family] = folder
        return self._models[family]

    def start(self, lane: str) -> None:
        """Begin to start what `split` and `single` will wait for, all at once."""
        family, page_tokens, flags = KINDS[lane]
        if lane not in self._splits:
            split = start_split(self.model(family), self._folder, lane, page_tokens, *flags)
            self._splits[lane] = split
            self._stack.enter_context(serving(split.pe, split.ce))
        if family not in self._singles:
            self._singles[family] = single = start_single(self.model(family), self._folder)
            self._stack.enter_context(serving(single))

    def split(self, lane: str) -> Split:
        """The PE and the CE whose pages take this lane."""
        self.start(lane)
        split = self._splits[lane]
        wait_for_links(split.ce, split.pe)
        split.ce.wait_ready()
        return split

    def single(self, lane: str) -> Server:
        """The unsplit engine with the same model."""
        self.start(lane)
        return self._singles[KINDS[lane][0]].wait_ready()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)
