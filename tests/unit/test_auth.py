# SPDX-License-Identifier: Apache-2.0
"""The cluster token and API keys: who may read them, what is accepted, and that neither stands for the other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys, bearer_header, load_cluster_token, token_matches
from kvrail.runtime.errors import ConfigError


def config(tmp_path: Path, **changes: str) -> LaunchConfig:
    return LaunchConfig(role="single", model="m", runtime_dir=str(tmp_path / "run"), **changes)  # type: ignore[arg-type]


def test_the_default_token_is_made_once_and_private(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_cluster_token(config(tmp_path)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    path = tmp_path / "run" / "cluster-token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["cluster-token"]


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 32 + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cluster_token(config(tmp_path, token_file=str(path)))
    path.chmod(0o600)
    assert load_cluster_token(config(tmp_path, token_file=str(path))) == b"x" * 32


@pytest.mark.parametrize(
    "content", ["", "short", "two words that are long enough", "zwölfundzwanzig-zeichen"]
)
def test_a_bad_token_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match="token"):
        load_cluster_token(config(tmp_path, token_file=str(path)))


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_cluster_token(config(tmp_path, token_file=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("header", "good"),
    [
        ("Bearer the-token-of-this-cluster", True),
        ("bearer the-token-of-this-cluster", True),
        ("Bearer the-token-of-this-cluste", False),
        ("Bearer the-token-of-this-cluster!", False),
        ("Bearer ", False),
        ("Basic the-token-of-this-cluster", False),
        ("the-token-of-this-cluster", False),
        ("Bearer tökén", False),
        (None, False),
    ],
)
def test_token_header(header: str | None, good: bool) -> None:
    assert token_matches(b"the-token-of-this-cluster", header) is good


def test_header_round_trip() -> None:
    assert token_matches(b"some-token", bearer_header(b"some-token")["Authorization"])


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the team\nalpha\n\nbeta\n")
    keys = ApiKeys(str(path))
    assert keys.allow("Bearer alpha")
    assert keys.allow("Bearer beta")
    for wrong in (None, "", "Bearer ", "Bearer # for the team", "Bearer gamma", "alpha"):
        assert not keys.allow(wrong)
    assert ApiKeys(None).allow(None)


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="no key"):
        ApiKeys(str(path))
