# SPDX-License-Identifier: Apache-2.0
"""What a user sets in vLLM's `kv_connector_extra_config` for this connector, checked when vLLM starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvrail.runtime.config import environment, is_loopback, runtime_directory
from kvrail.runtime.errors import ConfigError

__all__ = ["Settings"]

_KEYS = {
    "heartbeat_s": (float, 0.25),
    "kv_host": (str, "127.0.0.1"),
    "kv_port": (int, 14579),
    "lane": (str, "auto"),
    "meet_s": (float, 30.0),
    "peers": (list, []),
    "peers_file": (str, None),
    "push": (str, "chunk"),
    "put_transport": (str, "auto"),
    "require_lane": (str, None),
    "runtime_dir": (str, None),
    "status_file": (str, None),
    "ticket_ttl_s": (float, 30.0),
    "token_file": (str, None),
    "ucx": (str, None),
}
_CHOICES = {
    "lane": ("auto", "shm", "peer", "stream", "put"),
    "push": ("chunk", "layer"),
    "put_transport": ("auto", "cma", "tcp"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's settings; `role` is "pe" for vLLM's kv_producer and "ce" for its kv_consumer.

    `kv_port` is that of tensor-parallel rank 0 (rank i listens at kv_port + i); likewise the ports in `peers`.
    """

    role: Literal["pe", "ce"]
    kv_host: str
    kv_port: int
    # By the names under which a router may know them.
    peers_by_name: Mapping[tuple[str, int], tuple[str, int]]
    lane: Literal["auto", "shm", "peer", "stream", "put"]
    put_transport: Literal["auto", "cma", "tcp"]
    require_lane: str | None
    # PE: when blocks go out, after each chunk of a prompt or after each layer of one.
    push: Literal["chunk", "layer"]
    runtime_dir: Path
    # Of `runtime launch`, see front_files.py.
    peers_file: str | None
    status_file: str | None
    token_file: str | None
    meet_s: float
    ticket_ttl_s: float
    heartbeat_s: float
    ucx: str | None

    @classmethod
    def of(cls, kv_role: str | None, extra: Mapping[str, Any]) -> Settings:
        """From vLLM's configuration. Raises ConfigError saying which key is wrong, and how."""
        roles: dict[str | None, Literal["pe", "ce"]] = {"kv_producer": "pe", "kv_consumer": "ce"}
        if kv_role not in roles:
            raise ConfigError(
                f"kv_role {kv_role}: KvrailConnector needs kv_producer (this vLLM prefills for others) or kv_consumer "
                "(it decodes what others prefilled)"
            )
        if unknown := sorted(set(extra) - set(_KEYS)):
            raise ConfigError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; KvrailConnector knows {', '.join(_KEYS)}"
            )
        values = {name: _value(name, extra) for name in _KEYS}
        values["ucx"] = values["ucx"] or environment("KVRAIL_UCX")
        peers = _named(values.pop("peers"))
        role = roles[kv_role]
        if role == "ce" and not peers and values["peers_file"] is None:
            raise ConfigError(
                'kv_connector_extra_config: a kv_consumer needs "peers", a list of "host:port" of the kv_host and '
                "kv_port of each kv_producer: it dials nobody else"
            )
        if not is_loopback(values["kv_host"]) and values["token_file"] is None:
            raise ConfigError(
                f'kv_host {values["kv_host"]} is not on loopback: "token_file" must name the file with the cluster '
                "token, the same on both sides"
            )
        directory = runtime_directory(values.pop("runtime_dir"))
        return cls(role=role, peers_by_name=peers, runtime_dir=directory, **values)

    @property
    def peers(self) -> tuple[tuple[str, int], ...]:
        """(numeric address, port) of each PE that this CE may dial."""
        return tuple(dict.fromkeys(self.peers_by_name.values()))

    def peer_of(self, host: str, port: object) -> tuple[str, int] | None:
        """The peer that a request names, by name or address; None for one that is not listed.

        With a peers file only the workers know.
        """
        if self.peers_file is not None and type(port) is int:
            return host.strip("[]"), port
        return self.peers_by_name.get((host.strip("[]"), port if type(port) is int else -1))

    @property
    def told_host(self) -> str:
        """PE: the address that routers pass on."""
        try:
            return str(socket.getaddrinfo(self.kv_host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return self.kv_host  # The name of a network interface.


def _named(peers: list[str]) -> dict[tuple[str, int], tuple[str, int]]:
    found: dict[tuple[str, int], tuple[str, int]] = {}
    for peer in peers:
        host, colon, text = str(peer).rpartition(":")
        try:
            if not colon or not 0 < (port := int(text)) < 1 << 16:
                raise ValueError("no port")
            host = host.strip("[]")
            address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, ValueError) as error:
            raise ConfigError(f"peer {peer!r} is not host:port of a prefill engine: {error}") from None
        found[host, port] = found[address, port] = (address, port)
    return found


def _value(name: str, extra: Mapping[str, Any]) -> Any:
    kind, default = _KEYS[name]
    value = extra.get(name, default)
    if value is None and default is None:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (name in _CHOICES and value not in _CHOICES[name]):
        wanted = " or ".join(_CHOICES[name]) if name in _CHOICES else f"a {kind.__name__}"
        raise ConfigError(f"kv_connector_extra_config: {name} must be {wanted}, not {value!r}")
    if isinstance(value, float | int) and value < 0:
        raise ConfigError(f"kv_connector_extra_config: {name} must not be negative")
    return value
