# SPDX-License-Identifier: Apache-2.0
"""The GPU of a rank: which one it takes, what it has free, and what its peers are told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvrail.runtime.checkpoint import cache_dir
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.transfer.cuda import open_device
from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.gpu import Gpu

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["free_bytes", "gpu_facts", "open_cuda", "rank_device"]


def rank_device(config: LaunchConfig, rank: int) -> str:
    """The torch device of this rank: "cpu" or "cuda:N". Raises ConfigError when there are not as many GPUs."""
    ordinal = config.device_of(rank)
    if ordinal is None:
        return "cpu"
    visible = torch.cuda.device_count()
    if ordinal >= visible:
        ranks = f" for --dp {config.dp}" if config.dp > 1 else ""
        raise ConfigError(
            f"--device {config.device}{ranks}: rank {rank} needs GPU {ordinal}, and torch sees {visible} "
            "(CUDA_VISIBLE_DEVICES, or a torch without CUDA?)"
        )
    return f"cuda:{ordinal}"


def open_cuda(config: LaunchConfig, rank: int, library: str | None) -> _ucx.CudaDevice | None:
    """The CUDA device that holds this rank's pages, or (a CPU rank with --lane peer) copies out of its pinned memory.

    Raises ConfigError when it cannot be opened, or its page-copy kernels cannot be compiled.
    """
    ordinal = config.device_of(rank)
    if ordinal is None:
        if config.lane != "peer":
            return None
        ordinal = 0
    try:
        return open_device(ordinal, cache_dir(), library=library)
    except CudaFailed as error:
        raise ConfigError(f"GPU {ordinal} cannot be used: {error}") from error


def free_bytes(device: str) -> int | None:
    """What a GPU has free; None for the CPU."""
    return None if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def gpu_facts(device: _ucx.CudaDevice | None, sign_of_mps: str) -> Gpu | None:
    """What peers are told of this rank's GPU. `sign_of_mps`: see config.mps_sign; the driver is asked as well."""
    if device is None:
        return None
    mps = sign_of_mps or ("the driver says so" if device.shared_by_mps else "")
    return Gpu(uuid=device.uuid, name=device.name, mps=mps)
