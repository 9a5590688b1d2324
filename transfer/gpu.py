# SPDX-License-Identifier: Apache-2.0
"""What two ranks tell each other about their GPUs, and what the hardware between two of them offers.

The latter comes from the driver's management library (NVML, through nvidia-ml-py); without it nothing is known, and no
lane is called slow.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any, NamedTuple

import msgspec

__all__ = ["Gpu", "Offered", "offered", "pcie_gb_per_s", "shortfall"]

_log = logging.getLogger(__name__)

# GB/s of one PCIe lane and direction, by generation, without protocol overhead.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# A good lane reaches nine tenths of what its link carries in theory, and 75 % over NVLink.
_ENOUGH = 0.5


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One CUDA device, as both sides of a link may know it. `mps`: what says that MPS shares it ("" when nothing)."""

    uuid: bytes
    name: str
    mps: str = ""


class Offered(NamedTuple):
    """What lies between two memories: GB/s by the sheet, what it is, what is visibly wrong with it ("" for nothing)."""

    gb_per_s: float
    what: str
    trouble: str = ""


def shortfall(gb_per_s: float, hardware: Offered | None) -> str:
    """What to say of a lane that reaches so much over that hardware: "" unless it is far under it."""
    if hardware is None or gb_per_s >= _ENOUGH * hardware.gb_per_s:
        return ""
    why = hardware.trouble or "the cause is not known"
    return f"{gb_per_s:.3g} GB/s where {hardware.what} offers {hardware.gb_per_s:.3g} ({why})"


def pcie_gb_per_s(generation: int, width: int) -> float:
    """GB/s and direction of a PCIe link; 0 for a generation that is not known."""
    return _PCIE_LANE.get(generation, 0.0) * width


def offered(ours: Gpu | None, theirs: Gpu | None) -> Offered | None:
    """What the hardware of this host offers between the memories of two GPUs, or a GPU and the host (None for one of
    them). None when that is one and the same GPU, or cannot be found out.
    """
    gpus = [gpu for gpu in (ours, theirs) if gpu is not None]
    if not gpus or (len(gpus) == 2 and gpus[0].uuid == gpus[1].uuid):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return _ask(pynvml, [_handle(pynvml, gpu) for gpu in gpus])
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        _log.debug("NVML does not say how the GPUs are connected: %s", error)
        return None


def _handle(nvml: Any, gpu: Gpu) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=gpu.uuid)}")


def _ask(nvml: Any, handles: list[Any]) -> Offered | None:
    if len(handles) == 2 and _by_nvlink(nvml, *handles):
        slowest = min((_nvlinks(nvml, handle) for handle in handles), key=lambda found: found.gb_per_s)
        return slowest if slowest.gb_per_s else None
    return min((_pcie(nvml, handle) for handle in handles), key=lambda found: found.gb_per_s)


def _by_nvlink(nvml: Any, one: Any, other: Any) -> bool:
    status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _nvlinks(nvml: Any, handle: Any) -> Offered:
    up, down, speed = 0, 0, 0.0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break  # It has no more.
        if state:
            up += 1
            speed += _nvlink_gb_per_s(nvml, handle, link)
        else:
            down += 1
    trouble = f"{down} of its {up + down} links are down" if down else ""
    return Offered(speed, f"NVLink ({up} links)", trouble)


def _nvlink_gb_per_s(nvml: Any, handle: Any, link: int) -> float:
    """One link and direction. A driver answers one of these two questions, older ones the second."""
    for question in ((nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link), nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON):
        (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [question])
        if answer.nvmlReturn == nvml.NVML_SUCCESS:
            return float(answer.value.uiVal) / 1000
    return 0.0


def _pcie(nvml: Any, handle: Any) -> Offered:
    generation, most = (
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
    )
    width, widest = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    trouble = ""
    if (generation, width) != (most, widest):
        trouble = f"the link runs as generation {generation} x{width}"
    return Offered(pcie_gb_per_s(most, widest), f"PCIe {most}.0 x{widest}", trouble)
