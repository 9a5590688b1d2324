# SPDX-License-Identifier: Apache-2.0
"""Which settings mean something to which roles: a role refuses what it would never look at.

What is not in the table is for every role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvrail.runtime.errors import ConfigError

__all__ = ["ROLES", "check_roles", "flags_for", "roles_of"]

ROLES: Final = ("pe", "ce", "single")


class _Group(NamedTuple):
    """Settings (by their names in LaunchConfig) for `roles` alone, and why."""

    roles: tuple[str, ...]
    why: str
    names: tuple[str, ...]


# (--ticket-ttl-s and --trust-remote-code are for every role: with vLLM each of them uses them.)
_GROUPS: Final = (
    _Group(
        ("ce",),
        "only a ce has prefill engines",
        ("pe_url", "ssl_ca_certs", "local_prefill", "local_prefill_max_tokens"),
    ),
    _Group(("ce",), "the ce decides for both sides of a link", ("verify_kv", "link_share")),
    _Group(("pe",), "only a pe writes pages over links", ("copy_threads", "kv_port")),
    _Group(
        ("pe", "ce"),
        "a single engine has no links",
        ("kv_host", "lane", "put_transport", "require_lane", "heartbeat_s", "spin_us"),
    ),
    _Group(
        ("pe", "single"),
        "a ce keeps prefixes in its own page pool",
        ("hicache_size_gb", "hicache_state_slots", "hicache_state_interval"),
    ),
    _Group(
        ("ce", "single"),
        "a pe answers no clients, but its ce",
        (
            "routing",
            "thinking_mode",
            "chat_template",
            "tool_call_parser",
            "reasoning_parser",
            "tokenizer_backend",
            "tokenizer_verify_rate",
            "ignore_unknown_fields",
            "api_key_file",
            "max_queue",
            "max_prompt_tokens",
            "request_timeout_s",
        ),
    ),
)


def roles_of(name: str) -> tuple[str, ...]:
    """The roles to which the setting `name` means something."""
    return next((group.roles for group in _GROUPS if name in group.names), ROLES)


def check_roles(config: Any) -> None:
    """Raise ConfigError for a setting of the LaunchConfig `config` that is not its default and for other roles."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for group in _GROUPS:
        for name in group.names if config.role not in group.roles else ():
            if getattr(config, name) != defaults[name]:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} is for --role {' or '.join(group.roles)}, not for {config.role}: {group.why}"
                )


def flags_for(role: str, words: Sequence[str]) -> list[str]:
    """Those of the arguments of `runtime launch` that mean something to `role`: what is given for several at once."""
    taken: list[str] = []
    take = True
    for word in words:
        if word.startswith("--"):
            take = role in roles_of(word.partition("=")[0].removeprefix("--").replace("-", "_"))
        if take:
            taken.append(word)
    return taken
