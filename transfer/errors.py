# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the transfer layer.

TransferError
├── UcxFailed        a UCX call returned an error; carries the UCS status and the call
├── CudaFailed       a call of the CUDA driver failed, or there is none; carries the driver's name for the reason
├── LinkRefused      the handshake said no; carries the reason that the peer (or we) gave
│   └── LayoutMismatch   the page layouts differ; names the fields
├── LinkLost         the peer died, was fenced, or its connection broke
│   └── LinkSilent       heartbeats are missing: nothing is granted, but the peer may come back
├── LaneUnavailable  no lane that the options allow can work here; says why for each one tried
└── NoPages          the pool cannot give that many pages (or state slots) now
    └── ShareUsed        this link holds its share of the pool; another link may still be given pages
"""

from __future__ import annotations

__all__ = [
    "CudaFailed",
    "LaneUnavailable",
    "LayoutMismatch",
    "LinkLost",
    "LinkRefused",
    "LinkSilent",
    "NoPages",
    "ShareUsed",
    "TransferError",
    "UcxFailed",
]


class TransferError(Exception):
    """Anything that the transfer layer raises."""


class UcxFailed(TransferError):
    """A UCX call failed. `status` is the UCS status (negative), `call` the function that returned it."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call}: {text} (UCS status {status})")
        self.call = call
        self.status = status


class CudaFailed(TransferError):
    """A call of the CUDA driver failed, or cannot be made. The text says what is missing, or which limit was hit.

    `status` is the driver's name for the reason (CUDA_ERROR_…), or NO_DRIVER, or NO_KERNELS; `call` the function.
    """

    def __init__(self, call: str, status: str, text: str) -> None:
        super().__init__(f"{call}: {text} ({status})")
        self.call = call
        self.status = status


class LinkRefused(TransferError):
    """One side of a handshake refused the other; the text is the reason."""


class LayoutMismatch(LinkRefused):
    """Two page layouts differ. `fields` maps each field that does to (the pe's, the ce's): both sides read it."""

    def __init__(self, fields: dict[str, tuple[object, object]]) -> None:
        told = ", ".join(f"{name}: {pe!r} on the pe, {ce!r} on the ce" for name, (pe, ce) in fields.items())
        super().__init__(f"page layouts differ ({told})")
        self.fields = fields


class LinkLost(TransferError):
    """The peer is gone: its process died, its connection broke, or the link was fenced."""


class LinkSilent(LinkLost):
    """The peer's heartbeats are missing. It is not known to be dead: who has no other way may wait for it."""


class LaneUnavailable(TransferError):
    """No permitted lane works between these two ranks; the text says why for each one tried."""


class NoPages(TransferError):
    """The pool cannot give what was asked for at present."""


class ShareUsed(NoPages):
    """One link holds all that a link may hold (I8); requests for other links need not wait behind it."""
