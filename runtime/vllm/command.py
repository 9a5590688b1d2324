# SPDX-License-Identifier: Apache-2.0
"""From the settings of a role to the command line of its vLLM server. What cannot be carried over is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError

__all__ = ["check_settings", "server_command", "server_variables", "tensor_parallel_size"]

# Settings of the embedded engine, and what to use instead. With another value than their default, they are refused.
_NOT_FOR_VLLM = {
    "page_tokens": "vLLM's --block-size behind a --",
    "kv_pages": "--kv-memory-gb, or vLLM's --num-gpu-blocks-override behind a --",
    "state_slots": "nothing: vLLM sizes them itself",
    "hicache_size_gb": "vLLM's --kv-offloading-size behind a --",
    "hicache_state_slots": "nothing: vLLM sizes them itself",
    "hicache_state_interval": "nothing: vLLM decides by itself",
    "attention": "vLLM's --attention-backend behind a --",
    "cuda_graphs": "vLLM's --enforce-eager behind a --",
    "thinking_mode": "vLLM's --default-chat-template-kwargs behind a --",
    "tool_call_parser": "vLLM's --enable-auto-tool-choice and --tool-call-parser behind a --",
    "reasoning_parser": "vLLM's --reasoning-parser behind a --",
    "tokenizer_backend": "vLLM's --tokenizer-mode behind a --",
    "tokenizer_verify_rate": "nothing: vLLM has one tokenizer",
    "max_prompt_tokens": "--max-model-len",
    "ignore_unknown_fields": "nothing: vLLM leaves unknown fields out",
    "otlp_endpoint": "vLLM's --otlp-traces-endpoint behind a --",
    "verify_kv": "nothing: the connector has no checksums yet",
    "link_share": "nothing: vLLM's scheduler decides how many blocks wait for KV",
    "spin_us": "nothing: the connector decides by the cores",
    "copy_threads": "nothing: the connector has one",
}
# Arguments of vLLM that the role sets or that would open a way around its front, and what to use instead.
_OURS = {
    "--model": "--model before the --",
    "--served-model-name": "--served-model-name before the --",
    "--host": "--host before the --",
    "--port": "--port before the --",
    "--uds": "nothing: the role places it",
    "--api-key": "--api-key-file before the --",
    "--ssl-keyfile": "--ssl-keyfile before the --",
    "--ssl-certfile": "--ssl-certfile before the --",
    "--kv-transfer-config": "the settings of links and lanes before the --",
    "--data-parallel-size": "several roles, and --pe-url for each",
    "-dp": "several roles, and --pe-url for each",
    "--api-server-count": "nothing: a role has one",
    "-asc": "nothing: a role has one",
    "--headless": "nothing: a role has its own server",
    "--config": "the arguments themselves",
    "--root-path": "nothing: the front is in front",
    "--dtype": "--dtype before the --",
    "--max-model-len": "--max-model-len before the --",
}


def check_settings(config: LaunchConfig) -> None:
    """Raise ConfigError for settings that a role with vLLM cannot have."""
    defaults = {field.name: field.default for field in dataclasses.fields(LaunchConfig)}
    for name, instead in _NOT_FOR_VLLM.items():
        if getattr(config, name) != defaults[name]:
            raise ConfigError(
                f"{_flag(name)} is for the embedded engine, and not for --engine vllm: {_advice(instead)}"
            )
    if config.dp != 1:
        raise ConfigError(
            f"--dp {config.dp}: with --engine vllm a role is one vLLM engine. Launch several roles, and give the ce a "
            "--pe-url for each pe; for one model over several GPUs give vLLM's own --tensor-parallel-size behind a --"
        )
    if config.device not in ("cpu", "cuda", "cuda:0"):
        raise ConfigError(
            f"--device {config.device}: with --engine vllm choose GPUs by CUDA_VISIBLE_DEVICES; whether it runs on "
            "them is for the installed vLLM to say"
        )
    for argument in config.vllm_args:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"{argument} behind the -- is set by the role itself: {_advice(_OURS[name])}")


def server_command(config: LaunchConfig, folder: Path, kv_port: int) -> list[str]:
    """The command of the vLLM server: HTTP on a socket in `folder`, links from `kv_port` on."""
    flags: list[str] = ["--model", config.model, "--served-model-name", config.model_name]
    flags += ["--uds", str(folder / "vllm.sock"), "--dtype", config.dtype]
    flags += ["--middleware", "kvrail.runtime.vllm.server_app.ServerApp"]
    # Each request is logged once, by the front.
    flags += ["--disable-uvicorn-access-log", "--uvicorn-log-level", config.log_level]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    # When they are not given, vLLM has better defaults for its own engine than ours are.
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, name) is not None:
            flags += [_flag(name), str(getattr(config, name))]
    if config.kv_memory_gb is not None:
        flags += ["--kv-cache-memory-bytes", str(int(config.kv_memory_gb * 2**30))]
    if config.chat_template is not None:
        flags += ["--chat-template", config.chat_template]
    if config.trust_remote_code:
        flags.append("--trust-remote-code")
    if config.role != "single":
        flags += ["--kv-transfer-config", json.dumps(_transfer(config, folder, kv_port))]
    # -P: the working directory must not shadow installed packages.
    return [sys.executable, "-P", "-m", "kvrail.runtime.vllm.serve", *flags, *config.vllm_args]


def tensor_parallel_size(config: LaunchConfig) -> int:
    """GPUs that the model is spread over. Raises ConfigError for a number that is none."""
    arguments = [part for argument in config.vllm_args for part in argument.split("=", 1)]
    size = "1"
    for place, name in enumerate(arguments[:-1]):
        if name.replace("_", "-") in ("--tensor-parallel-size", "-tp"):
            size = arguments[place + 1]
    if not size.isdigit() or int(size) < 1:
        raise ConfigError(f"--tensor-parallel-size {size}: a number of GPUs")
    return int(size)


def server_variables(config: LaunchConfig) -> dict[str, str]:
    """Environment variables that the server needs whatever the user has set."""
    # A key of its own would lock the front out. The other one is a default that vLLM takes from the environment too.
    found = {"VLLM_API_KEY": "", "VLLM_LOGGING_LEVEL": config.log_level.upper()}
    # Longer than the front keeps idle connections, or a request of a client's meets one that is being closed.
    found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "30"
    if config.threads is not None:
        found["OMP_NUM_THREADS"] = str(config.threads)
    return found


def _transfer(config: LaunchConfig, folder: Path, kv_port: int) -> dict[str, Any]:
    return {
        "kv_connector": "KvrailConnector",
        "kv_connector_module_path": "kvrail.runtime.vllm.connector",
        "kv_role": "kv_producer" if config.role == "pe" else "kv_consumer",
        # A lost transfer ends the request in the core; the splitter has it computed again.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "token_file": str(Path(config.token_file).resolve()) if config.token_file else None,
            "runtime_dir": str(config.resolved_runtime_dir()),
            "kv_host": config.kv_host,
            "kv_port": kv_port,
            "lane": config.lane,
            "put_transport": config.put_transport,
            "require_lane": config.require_lane,
            "ticket_ttl_s": config.ticket_ttl_s,
            "heartbeat_s": config.heartbeat_s,
            "ucx": config.ucx,
            "status_file": str(folder / "connector.json"),
            "peers_file": str(folder / "peers.json"),
        },
    }


def _advice(instead: str) -> str:
    """What to do: `instead` names a setting, or says why there is none ("nothing: …")."""
    if instead.startswith("nothing: "):
        return instead.removeprefix("nothing: ")
    return f"use {instead}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
