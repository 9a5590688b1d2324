# SPDX-License-Identifier: Apache-2.0
"""A pool's memory as UCX knows it: registered once, and let go only when no link lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvrail.transfer.errors import TransferError

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Registration"]


class Registration:
    """`nbytes` bytes from `address` on, registered with UCX for pool `name`. Raises what UCX refuses them with."""

    def __init__(
        self, context: _ucx.Context, address: int, nbytes: int, memory: Literal["host", "cuda"], name: str
    ) -> None:
        self._name = name
        self._region: _ucx.Region | None = context.register(address, nbytes, memory)

    def packed_key(self) -> bytes:
        """The remote key that a peer needs for UCX puts into this pool."""
        if self._region is None:
            raise TransferError(f"pool {self._name} is closed")
        return self._region.packed_key()

    def close(self) -> None:
        """Unregister; closed already is fine. Raises TransferError while a link lives."""
        if self._region is None:
            return
        try:
            self._region.close()
        except Exception as error:
            raise TransferError(
                f"pool {self._name} is still in use: close the links first ({error})"
            ) from error
        self._region = None
