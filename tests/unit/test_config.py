# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused before anything starts, each by one line that names its flag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import load_cluster_token
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.process import RankProcesses

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("--dp", {"dp": 0}),
    ("--dp", {"dp": 100_000}),
    ("--port", {"port": -1}),
    ("--port", {"port": 65536}),
    ("--device", {"device": "abacus"}),
    ("--page-tokens", {"page_tokens": 15}),
    ("--kv-pages", {"kv_pages": 1}),
    ("--kv-pages", {"kv_pages": 10**20}),
    ("--kv-memory-gb", {"kv_memory_gb": 0.0}),
    ("--kv-memory-gb", {"kv_memory_gb": math.inf}),
    ("--kv-memory-gb", {"kv_memory_gb": math.nan}),
    ("--kv-pages", {"kv_pages": 4, "kv_memory_gb": 1.0}),
    ("--max-model-len", {"max_model_len": 0}),
    ("--max-num-seqs", {"max_num_seqs": 0}),
    ("--max-num-batched-tokens", {"max_num_batched_tokens": 15}),
    ("--max-queue", {"max_queue": -1}),
    ("--local-prefill-max-tokens", {"local_prefill_max_tokens": -1}),
    ("--spin-us", {"spin_us": -1}),
    ("--copy-threads must be", {"role": "pe", "copy_threads": 0}),
    ("--copy-threads must be", {"role": "pe", "copy_threads": 65}),
    ("--verify-kv", {"verify_kv": math.nan}),
    ("--link-share", {"link_share": 0.0}),
    ("--heartbeat-s", {"heartbeat_s": math.inf}),
    ("--heartbeat-s", {"heartbeat_s": 0.0}),
    ("--ticket-ttl-s", {"ticket_ttl_s": math.inf}),
    ("--ticket-ttl-s", {"ticket_ttl_s": 1.0, "heartbeat_s": 0.5}),
    ("--require-lane", {"require_lane": "rdma"}),
    ("--lane", {"require_lane": "shm", "lane": "put"}),
    ("--put-transport", {"require_lane": "put/tcp", "put_transport": "cma"}),
    ("--pe-url", {"pe_url": ("localhost:8889",)}),
    ("--pe-url", {"pe_url": ("http://",)}),
    ("--pe-url", {"pe_url": ("http://pe:port",)}),
    ("--pe-url", {"role": "single", "pe_url": ("http://pe:1",)}),
    ("--pe-url", {"local_prefill": "never"}),
    ("--dtype", {"dtype": "int3"}),
    ("--host", {"host": "0.0.0.0"}),
    ("--kv-host", {"kv_host": "eth0"}),
]


@pytest.mark.parametrize(("flag", "settings"), WRONG, ids=[str(settings) for _, settings in WRONG])
def test_what_cannot_work_is_refused_by_name(flag: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=flag) as refusal:
        LaunchConfig(**{"role": "ce", "model": "m", **settings})
    assert "\n" not in str(refusal.value)


def test_what_can_work_is_taken() -> None:
    LaunchConfig(
        role="ce",
        model="m",
        port=0,
        pe_url=("http://[::1]:8889/", "https://pe"),
        lane="put",
        require_lane="put/cma",
        put_transport="cma",
        max_queue=0,
    )
    LaunchConfig(role="pe", model="m", require_lane="put/rc_mlx5")


@pytest.mark.parametrize("name", ["file/below", "x" * 100], ids=["no folder", "too long"])
def test_a_runtime_folder_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    config = LaunchConfig(role="single", model="m", runtime_dir=str(tmp_path / name))
    use = RankProcesses if len(name) > 50 else lambda config, _: load_cluster_token(config)
    with pytest.raises(ConfigError, match="--runtime-dir"):
        use(config, b"")
