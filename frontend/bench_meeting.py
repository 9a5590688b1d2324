# SPDX-License-Identifier: Apache-2.0
"""How the two ranks of transfer-bench meet: rank 0 listens, rank 1 dials, and each proves that it holds the token.

    rank 0 → rank 1   which program and version, nonce
    rank 1 → rank 0   the same, HMAC(token, "rank 1", both nonces)
    rank 0 → rank 1   HMAC(token, "rank 0", both nonces), or why not

Without a token both use a well-known one: then whoever comes first is let in.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from kvrail.frontend.bench_lines import Lines, OtherGone, notice_a_cut
from kvrail.transfer.errors import TransferError

__all__ = ["NO_TOKEN", "meet"]

NO_TOKEN = b"transfer-bench between hosts that trust their network"
# Of the commands between the ranks.
_VERSION = 1
_PROGRAM = "kvrail transfer-bench"
# Strangers may come to an open port; none may keep the other rank from it for long.
_STRANGER_S = 3.0
_STRANGER_BYTES = 4096
_REDIAL_S = 0.2
# An answer may be as late as a batch that does not arrive.
_ANSWER_S = 120.0
# Rank 0 measures nothing meanwhile, but may have much to prepare.
_COMMAND_S = 300.0


class _Stranger(Exception):
    """Whoever this is, it is not the other rank."""


def meet(
    host: str, port: int, rank: int, *, token: bytes, within_s: float, say: Callable[[str], object]
) -> Lines:
    """The connection of both ranks, as soon as the other one is there.

    Raises TransferError saying what to do: nobody came within `within_s` seconds, rank 0 cannot listen there, or the
    other one has another token or version.
    """
    until = time.monotonic() + within_s
    lines = _wait(host, port, token, until, say) if rank == 0 else _dial(host, port, token, until)
    if lines is None:
        raise TransferError(
            f"rank {1 - rank} did not come to {host} port {port} within {within_s:g} s: start it on the other host "
            f"at the same time, with the same --rendezvous and --rank {1 - rank}, and see that this port of rank 0 "
            "is open to it"
        )
    return lines


def _wait(host: str, port: int, token: bytes, until: float, say: Callable[[str], object]) -> Lines | None:
    """Rank 0."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(found[0][0], socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"--rendezvous: {host}: {error.strerror or error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(found[0][4])
            listener.listen()
        except OSError as error:
            raise TransferError(
                f"rank 0 must listen on {host} port {port}, an address and a free port of its own host: "
                f"{error.strerror or error}"
            ) from None
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                sock, whence = listener.accept()
            except TimeoutError:
                return None
            lines = Lines(sock, "rank 1", _STRANGER_S)
            try:
                _receive(lines, token)
            except (_Stranger, OtherGone, ValueError) as error:
                lines.close()
                say(f"{whence[0]} was sent away: {error}")
            else:
                return _met(lines, _ANSWER_S)
    return None


def _receive(lines: Lines, token: bytes) -> None:
    """Raises unless rank 1 is there, and lets it in."""
    nonce = os.urandom(32).hex()
    lines.tell(**_me(0, nonce))
    theirs = _hear(lines)
    try:
        _judge(theirs, 0)
        _check(theirs, _proof(token, 1, nonce, theirs["nonce"]))
    except _Stranger as error:
        with contextlib.suppress(OtherGone):
            lines.tell(refused=str(error))
        raise
    lines.tell(proof=_proof(token, 0, nonce, theirs["nonce"]))


def _dial(host: str, port: int, token: bytes, until: float) -> Lines | None:
    """Rank 1: again and again, until rank 0 listens."""
    trouble: OSError | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((host, port), left)
        except socket.gaierror as error:
            raise TransferError(f"--rendezvous: {host}: {error.strerror or error}") from None
        except OSError as error:
            trouble = error
            time.sleep(_REDIAL_S)
            continue
        lines = Lines(sock, "rank 0", left)
        try:
            _introduce(lines, token)
        except (_Stranger, ValueError) as error:
            lines.close()
            raise TransferError(f"{host} port {port}: {error}") from None
        except OtherGone as error:
            lines.close()
            raise TransferError(f"{host} port {port}: {error}: is another --rank 1 with it?") from None
        return _met(lines, _COMMAND_S)
    if trouble is not None and not isinstance(trouble, TimeoutError):
        raise TransferError(
            f"rank 0 cannot be reached at {host} port {port}: {trouble.strerror or trouble}; start it there, with the "
            "same --rendezvous and --rank 0, and see that this port is open"
        )
    return None


def _introduce(lines: Lines, token: bytes) -> None:
    nonce = os.urandom(32).hex()
    theirs = _hear(lines)
    _judge(theirs, 1)
    lines.tell(**_me(1, nonce), proof=_proof(token, 1, theirs["nonce"], nonce))
    verdict = _hear(lines)
    if "refused" in verdict:
        raise _Stranger(f"rank 0 refused: {verdict['refused']}")
    _check(verdict, _proof(token, 0, theirs["nonce"], nonce))


def _me(rank: int, nonce: str) -> dict[str, Any]:
    return {"program": _PROGRAM, "version": _VERSION, "rank": rank, "nonce": nonce}


def _hear(lines: Lines) -> dict[str, Any]:
    said = lines.hear(_STRANGER_BYTES)
    if said is None:
        raise OtherGone("it has closed the connection")
    return said


def _judge(theirs: dict[str, Any], rank: int) -> None:
    """Raises _Stranger unless these are the words of the other rank."""
    if theirs.get("program") != _PROGRAM or not isinstance(theirs.get("nonce"), str):
        raise _Stranger("this is no transfer-bench")
    if theirs.get("version") != _VERSION:
        raise _Stranger("the two ranks are of different versions of kvrail: install the same on both hosts")
    if theirs.get("rank") != 1 - rank:
        raise _Stranger(f"there are two of --rank {rank}: give one of them --rank {1 - rank}")


def _check(theirs: dict[str, Any], proof: str) -> None:
    if not hmac.compare_digest(proof.encode(), str(theirs.get("proof")).encode()):
        raise _Stranger("it has another token: give both ranks the same --token-file")


def _proof(token: bytes, rank: int, *nonces: str) -> str:
    return hmac.new(token, f"rank {rank} {' '.join(nonces)}".encode(), "sha256").hexdigest()


def _met(lines: Lines, within_s: float) -> Lines:
    lines.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_a_cut(lines.socket)
    # (The same object: the first command may have come with the last word of the meeting.)
    lines.allow(within_s)
    return lines
