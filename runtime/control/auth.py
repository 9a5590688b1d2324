# SPDX-License-Identifier: Apache-2.0
"""The two secrets of a role: the cluster token (engine to engine) and API keys (clients); never one for the other."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError

__all__ = ["ApiKeys", "bearer", "bearer_header", "cluster_token", "load_cluster_token", "token_matches"]

_SHORTEST_TOKEN = 16


def load_cluster_token(config: LaunchConfig) -> bytes:
    """The cluster token of these settings: see `cluster_token`."""
    return cluster_token(config.token_file, config.resolved_runtime_dir())


def cluster_token(token_file: str | None, directory: Path) -> bytes:
    """The cluster token: from `token_file`, else the one of this user on this machine, made on first use.

    The made one lies in the runtime folder `directory` with mode 0600. Raises ConfigError for a token that is too
    short, or a file that others can read.
    """
    if token_file:
        return _read_token(Path(token_file))
    path = directory / "cluster-token"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_token(path)
    except OSError as error:
        raise ConfigError(f"cannot keep the cluster token in {directory} (--runtime-dir): {error}") from None
    return _read_token(path)


def _make_token(path: Path) -> None:
    # Written aside and then linked: of two roles that start together one wins, and none reads half a token.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cluster-token-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _read_token(path: Path) -> bytes:
    try:
        status = path.stat()
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster token from {path}: {error}") from None
    if status.st_mode & 0o077:
        raise ConfigError(f"{path} holds the cluster token and others can read it: chmod 600 {path}")
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: a cluster token is one line of at least {_SHORTEST_TOKEN} characters without spaces "
            "(openssl rand -hex 32)"
        )
    return token.encode("ascii")


def bearer_header(token: bytes) -> dict[str, str]:
    """The header with which one engine calls another."""
    return {"Authorization": f"Bearer {token.decode('ascii')}"}


def bearer(authorization: str | None) -> bytes | None:
    """The token of an `Authorization: Bearer …` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" and token else None


def token_matches(expected: bytes, authorization: str | None) -> bool:
    """Whether the header carries the token; takes equally long however much of it is right."""
    return hmac.compare_digest(bearer(authorization) or b"", expected)


class ApiKeys:
    """The keys that clients of the OpenAI routes may use; without a file every client may."""

    def __init__(self, path: str | None) -> None:
        self._digests: list[bytes] = []
        self.required = path is not None
        if path is None:
            return
        try:
            lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --api-key-file {path}: {error}") from None
        self._digests = [
            hashlib.sha256(line.encode()).digest() for line in lines if line and not line.startswith("#")
        ]
        if not self._digests:
            raise ConfigError(f"--api-key-file {path} holds no key: one a line")

    def allow(self, authorization: str | None) -> bool:
        """Whether the header carries one of the keys. Every key is compared, each in constant time."""
        if not self.required:
            return True
        digest = hashlib.sha256(bearer(authorization) or b"").digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found
