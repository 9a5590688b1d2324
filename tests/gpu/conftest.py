# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a CUDA device; without one they skip and say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrail.kernels.page_copy import KernelsUnavailable, PageCopier, PageKernels


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PageKernels:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    cache: Path = tmp_path_factory.mktemp("cubins")
    try:
        return PageKernels.load(0, cache)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def copier(kernels: PageKernels) -> PageCopier:
    """Launches on torch's default stream, in order with what the tests do through torch."""
    return kernels.on(torch.cuda.current_stream(kernels.device))


@pytest.fixture
def peer(kernels: PageKernels) -> int:
    """A second device whose memory the first one can reach."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs with peer access")
    from cuda.bindings import runtime

    runtime.cudaSetDevice(kernels.device)
    (status,) = runtime.cudaDeviceEnablePeerAccess(1, 0)
    assert status in (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
    return 1
