# SPDX-License-Identifier: Apache-2.0
"""A CUDA device for the transfer layer: opened through the native module, with the page kernels loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.ucx import load_library

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaDevice

__all__ = ["open_device"]


def open_device(ordinal: int, kernel_cache: Path | None, *, library: str | None = None) -> CudaDevice:
    """CUDA device number `ordinal` (as torch counts them), ready for GPU pools and copies.

    `kernel_cache`: folder of compiled kernels (None: compile them each time, in less than a second). `library`: which
    UCX, as for `load_library`. Raises CudaFailed naming what is missing: the driver, the device, cuda.core, NVRTC.
    """
    load_library(library)
    from kvrail.transfer import _ucx

    device = _ucx.CudaDevice(ordinal)
    # Imported on first use: these need torch.
    from kvrail.kernels.page_copy import KernelsUnavailable, PageKernels

    try:
        code = PageKernels.machine_code(ordinal, kernel_cache)
    except KernelsUnavailable as error:
        raise CudaFailed("open_device", "NO_KERNELS", str(error)) from error
    device.load_kernels(code)
    return device
