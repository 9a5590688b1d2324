# SPDX-License-Identifier: Apache-2.0
"""A setting that a role would never look at is refused, by a line that says whose it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer

from kvrail.frontend import cli
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.role_settings import ROLES, flags_for, roles_of

# Something other than the default for each setting that is not for every role.
VALUES: dict[str, Any] = {
    "pe_url": ("http://127.0.0.1:1",),
    "ssl_ca_certs": "ca.pem",
    "local_prefill": "always",
    "local_prefill_max_tokens": 5,
    "verify_kv": 1.0,
    "link_share": 0.5,
    "copy_threads": 2,
    "kv_port": 14600,
    "kv_host": "127.0.0.2",
    "lane": "put",
    "put_transport": "tcp",
    "require_lane": "put",
    "heartbeat_s": 0.5,
    "spin_us": 0,
    "hicache_size_gb": 0.0,
    "hicache_state_slots": 2,
    "hicache_state_interval": 2,
    "routing": "prefix",
    "thinking_mode": "thinking",
    "chat_template": "chat.jinja",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "tokenizer_backend": "hf",
    "tokenizer_verify_rate": 1.0,
    "ignore_unknown_fields": True,
    "api_key_file": "keys",
    "max_queue": 0,
    "max_prompt_tokens": 5,
    "request_timeout_s": 1.0,
}
NAMES = [field.name for field in dataclasses.fields(LaunchConfig)]


def test_every_setting_of_some_roles_is_tried_here() -> None:
    assert set(VALUES) == {name for name in NAMES if roles_of(name) != ROLES}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_is_refused_where_it_means_nothing(name: str, role: Any) -> None:
    settings: dict[str, Any] = {"role": role, "model": "m", name: VALUES[name]}
    if name == "kv_port":
        settings["engine"] = "vllm"
    if role in roles_of(name):
        LaunchConfig(**settings)
        return
    with pytest.raises(ConfigError) as refusal:
        LaunchConfig(**settings)
    flag, said = "--" + name.replace("_", "-"), str(refusal.value)
    whose = " or ".join(roles_of(name))
    assert said.startswith(f"{flag} is for --role {whose}, not for {role}: ")


def test_the_commands_of_two_roles_from_one_line() -> None:
    words = ["--dtype", "float32", "--verify-kv", "1", "--lane=put", "--pe-url", "a", "--pe-url", "b"]
    words += ["--no-cuda-graphs", "--max-queue", "5"]
    assert flags_for("pe", words) == ["--dtype", "float32", "--lane=put", "--no-cuda-graphs"]
    assert flags_for("ce", words) == words
    assert flags_for("single", words) == ["--dtype", "float32", "--no-cuda-graphs", "--max-queue", "5"]


def test_help_says_whose_a_setting_is() -> None:
    launch = typer.main.get_command(cli.app).commands["launch"]  # type: ignore[attr-defined]
    assert {one.name for one in launch.params} >= set(NAMES)
    for one in launch.params:
        if one.name != "help":
            whose = ", ".join(roles_of(one.name)) + ": "
            assert one.help.startswith(whose) == (roles_of(one.name) != ROLES), one.help
