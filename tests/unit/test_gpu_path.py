# SPDX-License-Identifier: Apache-2.0
"""What is said of the hardware between two GPUs, and when a lane is called slow. NVML's answers are played here."""

from __future__ import annotations

import sys
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.transfer.gpu import Gpu, Offered, offered, pcie_gb_per_s, shortfall

ONE, OTHER = Gpu(uuid=b"1" * 16, name="A"), Gpu(uuid=b"2" * 16, name="B")


class NVMLError(Exception):
    pass


class Nvml:
    """Two GPUs: joined by `links` NVLinks of which `down` are down, or by PCIe as it runs now (generation, width)."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_SUCCESS = 2, 0, 0
    NVML_FI_DEV_NVLINK_GET_SPEED, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 164, 90
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(
        self,
        links: int = 0,
        down: int = 0,
        pcie: tuple[int, int] = (5, 16),
        speed_fields: tuple[int, ...] = (164,),
    ) -> None:
        self.links, self.down, self.pcie, self.speed_fields = links, down, pcie, speed_fields
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        known = {f"GPU-{uuid.UUID(bytes=gpu.uuid)}" for gpu in (ONE, OTHER)}
        if name not in known:
            raise NVMLError("not found")
        return name

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        return 0 if self.links else 5

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= self.links:
            raise NVMLError("no such link")
        return int(link >= self.down)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int | tuple[int, int]]) -> list[Any]:
        (field,) = (asked if isinstance(asked, int) else asked[0] for asked in fields)
        known = field in self.speed_fields
        return [
            SimpleNamespace(nvmlReturn=0 if known else 3, value=SimpleNamespace(uiVal=26562 if known else 0))
        ]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return self.pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return self.pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


def with_nvml(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [164, 90])
def test_nvlink_is_what_its_links_carry(monkeypatch: pytest.MonkeyPatch, field: int) -> None:
    nvml = Nvml(links=18, speed_fields=(field,))
    with_nvml(monkeypatch, nvml)
    assert offered(ONE, OTHER) == Offered(pytest.approx(478.1, abs=0.1), "NVLink (18 links)", "")
    assert nvml.open == 0


def test_links_that_are_down_are_the_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, Nvml(links=18, down=6))
    found = offered(ONE, OTHER)
    assert found is not None
    assert found.what == "NVLink (12 links)"
    assert found.trouble == "6 of its 18 links are down"


def test_pcie_is_what_the_slot_could_do_and_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, Nvml(pcie=(3, 8)))
    for found in (offered(ONE, OTHER), offered(ONE, None), offered(None, OTHER)):
        assert found == Offered(pcie_gb_per_s(5, 16), "PCIe 5.0 x16", "the link runs as generation 3 x8")


def test_what_cannot_be_known_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, Nvml(links=18))
    assert offered(ONE, ONE) is None
    assert offered(None, None) is None
    assert offered(ONE, Gpu(uuid=b"9" * 16, name="elsewhere")) is None
    with_nvml(monkeypatch, Nvml(links=18, speed_fields=()))
    assert offered(ONE, OTHER) is None
    with_nvml(monkeypatch, None)
    assert offered(ONE, OTHER) is None


def test_a_lane_is_slow_below_half_of_its_hardware() -> None:
    link = Offered(478.0, "NVLink (18 links)", "")
    assert shortfall(350.0, link) == shortfall(1.0, None) == shortfall(float("inf"), link) == ""
    assert shortfall(40.0, link) == "40 GB/s where NVLink (18 links) offers 478 (the cause is not known)"
    assert "6 links are down" in shortfall(40.0, link._replace(trouble="6 links are down"))
