# SPDX-License-Identifier: Apache-2.0
"""Which interface an address is on, and by which scope a peer's link-local address is dialed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrail.transfer import interfaces
from kvrail.transfer.errors import TransferError
from kvrail.transfer.interfaces import fault_for_ucx, interface_of, ipv4_of, with_our_scope
from kvrail.transfer.ucx import load_library


@pytest.mark.parametrize(
    ("host", "kv_host", "dialed"),
    [
        ("fe80::1", "fe80::2%eth7", "fe80::1%eth7"),
        ("fe80::1", "127.0.0.1", "fe80::1%lo"),
        ("fe80::1", "lo", "fe80::1%lo"),
        # From this host's user.
        ("fe80::1%eth3", "fe80::2%eth7", "fe80::1%eth3"),
        # Whose meaning is the same everywhere.
        ("fd00::1", "fe80::2%eth7", "fd00::1"),
        ("::1", "fe80::2%eth7", "::1"),
        ("10.0.0.1", "fe80::2%eth7", "10.0.0.1"),
        ("169.254.0.1", "fe80::2%eth7", "169.254.0.1"),
        ("no address", "fe80::2%eth7", "no address"),
    ],
)
def test_a_link_local_address_is_dialed_on_our_interface(host: str, kv_host: str, dialed: str) -> None:
    load_library()
    assert with_our_scope(host, kv_host) == dialed


def test_interfaces_are_found_by_name_and_address() -> None:
    load_library()
    assert [interface_of(host) for host in ("lo", "127.0.0.1", "127.3.2.1", "localhost")] == ["lo"] * 4
    for nowhere in ("198.51.100.7", "no-host.invalid"):
        with pytest.raises(TransferError, match=f"--kv-host {nowhere}"):
            interface_of(nowhere)
    assert ipv4_of("lo") == "127.0.0.1"
    with pytest.raises(OSError):
        ipv4_of("no-such-interface")


@pytest.mark.parametrize(
    ("listed", "usable"),
    [
        ("fe80000000000000000000000000001a 02 40 20 80 noipv4", False),
        ("fe80000000000000000000000000001a 02 40 20 80 other0\nfd00::1 02 40 00 80 other0", False),
        (
            "fe80000000000000000000000000001a 02 40 20 80 noipv4\n"
            "fd000000000000000000000000000001 02 40 00 80 noipv4",
            True,
        ),
    ],
)
def test_an_interface_of_which_ucx_can_use_nothing(
    listed: str, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(listed + "\n")
    monkeypatch.setattr(interfaces, "_IF_INET6", table)
    assert ("does not use IPv6 link-local" in fault_for_ucx("noipv4")) is not usable
    assert fault_for_ucx("lo") == ""
