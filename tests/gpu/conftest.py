# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a CUDA device; without one they skip and say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrail.kernels.page_copy import KernelsUnavailable, PageKernels


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PageKernels:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    cache: Path = tmp_path_factory.mktemp("cubins")
    try:
        return PageKernels.load(0, cache)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
