# SPDX-License-Identifier: Apache-2.0
"""From the settings of a role to the command of its vLLM server: what is carried over, and what is refused by name."""

from __future__ import annotations

import inspect
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.upstream import Upstream
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.command import (
    check_settings,
    server_command,
    server_variables,
    tensor_parallel_size,
)
from kvrail.runtime.vllm.installed import check_version, installed_version
from kvrail.runtime.vllm.ports import free_ports, told_host


def settings(role: str = "single", **changes: Any) -> LaunchConfig:
    return LaunchConfig(**{"role": role, "engine": "vllm", "model": "/models/Tiny", **changes})


def flags(config: LaunchConfig) -> dict[str, str]:
    command = server_command(config, Path("/run/here"), 4000)
    assert command[1:4] == ["-P", "-m", "kvrail.runtime.vllm.serve"]
    return dict(zip(command[4:], [*command[5:], ""], strict=True))


def test_names_map_onto_those_of_vllm() -> None:
    config = settings(max_model_len=100, max_num_seqs=3, dtype="float32", kv_memory_gb=0.5, threads=2)
    found = flags(config)
    assert found["--model"] == "/models/Tiny"
    assert found["--served-model-name"] == "Tiny"
    assert found["--uds"] == "/run/here/vllm.sock"
    assert (found["--max-model-len"], found["--max-num-seqs"], found["--dtype"]) == ("100", "3", "float32")
    assert found["--kv-cache-memory-bytes"] == str(2**29)
    assert "--max-num-batched-tokens" not in found, "vLLM's own default"
    # Those that the embedded engine has without being told count as well when they are given.
    found = flags(settings(max_num_seqs=64, max_num_batched_tokens=2048))
    assert (found["--max-num-seqs"], found["--max-num-batched-tokens"]) == ("64", "2048")
    assert "--kv-transfer-config" not in found, "one engine moves nothing"
    assert server_variables(config)["OMP_NUM_THREADS"] == "2"
    assert server_variables(config)["VLLM_API_KEY"] == "", "it would lock the front out"
    kept_s = inspect.signature(Upstream).parameters["idle_s"].default
    assert int(server_variables(config)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 2 * kept_s


@pytest.mark.parametrize(("role", "kv_role"), [("pe", "kv_producer"), ("ce", "kv_consumer")])
def test_a_pair_gets_a_connector(role: str, kv_role: str, tmp_path: Path) -> None:
    config = settings(role, lane="put", runtime_dir=str(tmp_path), vllm_args=("--enforce-eager",))
    command = server_command(config, tmp_path / "x", 4000)
    assert command[-1] == "--enforce-eager"
    found = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra = found.pop("kv_connector_extra_config")
    assert found == {
        "kv_connector": "KvrailConnector",
        "kv_connector_module_path": "kvrail.runtime.vllm.connector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "fail",
    }
    assert (extra["kv_port"], extra["lane"], extra["runtime_dir"]) == (4000, "put", str(tmp_path))
    assert not any("token" in key and value for key, value in extra.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_tokens": 64}, "--page-tokens is for the embedded engine"),
        ({"tool_call_parser": "hermes"}, "vLLM's --enable-auto-tool-choice"),
        ({"dp": 2}, "--dp 2"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"vllm_args": ("--port=1",)}, "--port=1 behind the --"),
        ({"vllm_args": ("--kv_transfer_config", "{}")}, "--kv_transfer_config behind the --"),
        ({"vllm_args": ("-dp", "2")}, "-dp behind the --"),
    ],
)
def test_what_a_role_with_vllm_cannot_have(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(settings(**changes))
    check_settings(settings(vllm_args=("--tensor-parallel-size", "2", "--seed", "3")))


def test_the_embedded_engine_takes_no_arguments() -> None:
    with pytest.raises(ConfigError, match="--seed 3: arguments behind a -- are for --engine vllm"):
        LaunchConfig(role="single", model="m", vllm_args=("--seed", "3"))


def test_tensor_parallel_size() -> None:
    assert tensor_parallel_size(settings()) == 1
    assert tensor_parallel_size(settings(vllm_args=("--tensor-parallel-size", "4"))) == 4
    assert tensor_parallel_size(settings(vllm_args=("--enforce-eager", "-tp=2"))) == 2
    with pytest.raises(ConfigError, match="a number of GPUs"):
        tensor_parallel_size(settings(vllm_args=("-tp", "two")))


def test_versions() -> None:
    for version in ("0.26.0", "0.32.0+cpu", "0.33.1rc1"):
        check_version(version)
    for version in ("0.25.9", "0.34.0", "1.0", "dev"):
        with pytest.raises(ConfigError, match=r"works with 0\.26 to 0\.33"):
            check_version(version)


def test_a_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        installed_version()


def test_ports() -> None:
    first = free_ports("127.0.0.1", None, 3)
    assert 14600 <= first < 30000
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--kv-port"):
            free_ports("127.0.0.1", port, 1)
    assert told_host("localhost") == "127.0.0.1"
    assert told_host("lo") == "127.0.0.1"
