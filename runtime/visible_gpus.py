# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs that were asked for are there: the driver is asked, before torch takes seconds to be imported.

Opens no device. A rank still finds out by itself what only torch knows.
"""

from __future__ import annotations

import ctypes

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError

__all__ = ["check_gpus"]


def check_gpus(config: LaunchConfig) -> None:
    """Raise ConfigError when a rank of this role would find no GPU."""
    last = config.device_of(config.dp - 1)
    if last is None:
        return
    ranks = f" for --dp {config.dp}" if config.dp > 1 else ""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError(
            f"--device {config.device}{ranks}: this machine has no NVIDIA driver (libcuda.so.1); "
            "install it, or take --device cpu"
        ) from None
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    # CUDA_ERROR_NO_DEVICE is what it says of none.
    if status not in (0, 100):
        raise ConfigError(
            f"--device {config.device}{ranks}: the NVIDIA driver cannot be used (CUDA error {status}); see nvidia-smi"
        )
    if last >= count.value:
        raise ConfigError(
            f"--device {config.device}{ranks}: needs GPU {last}, and {count.value} are visible "
            "(CUDA_VISIBLE_DEVICES counts); take fewer, or --device cpu"
        )
