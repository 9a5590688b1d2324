# SPDX-License-Identifier: Apache-2.0
"""Kernels of ours that are launched like torch's own: on its current stream, at little cost, also into a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvrail.kernels.compiled import KernelsUnavailable, cubin, device_architecture, require_cuda

__all__ = ["TorchKernels"]

# A prefill has a grid for every number of tokens.
_MOST_CONFIGS = 4096


class TorchKernels:
    """The kernels `names` of one CUDA C++ file, loaded on one device."""

    def __init__(self, source: Path, device: int, cache: Path | None, names: Sequence[str]) -> None:
        """Compile them, or take them from the folder `cache`. Raises KernelsUnavailable naming what is missing."""
        core = require_cuda()
        code = cubin(source, device_architecture(device), cache)
        try:
            module = core.ObjectCode.from_cubin(code)
            self._kernels = {name: module.get_kernel(name) for name in names}
        except Exception as error:  # the driver's class is private to cuda.core
            raise KernelsUnavailable(f"the kernels of {source.name} cannot be loaded: {error}") from error
        self._device = device
        self._core: Any = core
        # Both take longer to make than the launch itself.
        self._streams: dict[int, Any] = {}
        self._configs: dict[tuple[tuple[int, int], int], Any] = {}

    def launch(self, name: str, grid: tuple[int, int], block: int, *arguments: int | float) -> None:
        """Queue a kernel on torch's current stream. Integers go as 64 bits, floats as double."""
        address = torch.cuda.current_stream(self._device).cuda_stream
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = self._core.Stream.from_handle(address)
        config = self._configs.get((grid, block))
        if config is None:
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[grid, block] = self._core.LaunchConfig(grid=grid, block=block)
        self._core.launch(stream, config, self._kernels[name], *arguments)
