# SPDX-License-Identifier: Apache-2.0
"""Live servers with fake ranks, all stopped at a test's end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fastapi.dependencies.models
import httpx
import pytest

from kit.fake_rank import FakeRank
from kit.live_server import LiveServer, config
from kit.tiny_model import write_model_folder
from kvrail.runtime.messages import ToFront, ToRank

Behaviour = Callable[[FakeRank, ToRank], Iterable[ToFront]]


@dataclass
class Stand:
    """One server and the ranks behind it."""

    server: LiveServer
    ranks: list[FakeRank]
    client: httpx.Client

    @property
    def rank(self) -> FakeRank:
        return self.ranks[0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def stand(model: Path) -> Iterator[Callable[..., Stand]]:
    """A factory: stand(behave, role="single", …settings of the role)."""
    # Not tmp_path: the path of a Unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="kvrail-t"))
    number = 0
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_routes)
        stack.callback(shutil.rmtree, folder)

        def make(
            *behave: Behaviour,
            role: str = "single",
            ready: bool = True,
            silent_limit_s: float = 60.0,
            queue_limit: int = 8,
            max_model_len: int = 256,
            **settings: object,
        ) -> Stand:
            nonlocal number
            number += 1
            endpoints = [f"ipc://{folder}/{number}-{rank}" for rank in range(len(behave))]
            server = LiveServer(
                config(role, model, dp=len(behave), **settings), endpoints, silent_limit_s=silent_limit_s
            )
            ranks = [
                FakeRank(
                    endpoint,
                    act,
                    rank=rank,
                    queue_limit=queue_limit,
                    max_model_len=max_model_len,
                    say_ready=ready,
                )
                for rank, (endpoint, act) in enumerate(zip(endpoints, behave, strict=True))
            ]
            for rank in ranks:
                stack.callback(rank.stop)
            stack.callback(server.stop)
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30, trust_env=False))
            if ready and role != "pe":
                server.wait_ready()
            return Stand(server, ranks, client)

        yield make


def _forget_routes() -> None:
    """FastAPI remembers every route function, and with it all of a server: 15 MB for each that the tests start."""
    for remembered in vars(fastapi.dependencies.models).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
