# SPDX-License-Identifier: Apache-2.0
"""The GPU of a vLLM worker, for the transfer layer: None of it on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrail.runtime.config import mps_sign
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.settings import Settings
from kvrail.transfer.cuda import open_device

if TYPE_CHECKING:
    import torch

    from kvrail.transfer import _ucx
    from kvrail.transfer.gpu import Gpu

__all__ = ["cuda_of", "stream_of"]


def cuda_of(device: torch.device, settings: Settings) -> tuple[_ucx.CudaDevice | None, Gpu | None]:
    """The device that KV tensors lie on, opened for pushes, and what peers hear of it."""
    if device.type == "cpu":
        return None, None
    if device.type != "cuda":
        raise ConfigError(f"KvrailConnector moves KV of CPUs and CUDA GPUs, not of {device.type}")
    # Imported here, as in stream_of: it brings torch, without which everything else of a worker loads in a moment.
    from kvrail.runtime.cuda_memory import gpu_facts

    cuda = open_device(device.index or 0, None, library=settings.ucx)
    return cuda, gpu_facts(cuda, mps_sign())


def stream_of(cuda: _ucx.CudaDevice | None) -> int | None:
    """The CUDA stream on which the calling thread queues its work; None on a CPU."""
    if cuda is None:
        return None
    import torch

    current: Any = torch.cuda.current_stream(cuda.ordinal)
    return int(current.cuda_stream)
