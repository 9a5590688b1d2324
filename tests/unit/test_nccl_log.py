# SPDX-License-Identifier: Apache-2.0
"""NCCL's debug log is read as NCCL writes it: a recorded one, and lines of networks that no test machine has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from kvrail.frontend.doctor_nccl import examine_nccl, nccl_unusable
from kvrail.transfer.nccl_log import parse_log

# NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,ENV,NET,P2P,GRAPH,TUNING of transfer/nccl_probe.py; one of each kind of line.
RECORDED = Path(__file__).parent / "recorded" / "nccl-2.28-two-h200.log"


def test_a_recorded_log() -> None:
    facts = parse_log(RECORDED.read_text().splitlines())
    assert (facts.version, facts.cuda) == ("2.28.9", "13.0")
    assert facts.transport == "P2P/CUMEM"
    assert facts.sendrecv == {"0 -> 1": Counter({"P2P/CUMEM": 32})}
    assert facts.collectives == {
        "0 -> 1": Counter({"P2P/CUMEM": 24}),
        "1 -> 0": Counter({"P2P/CUMEM": 24}),
    }
    assert facts.network == "Socket"
    # InfiniBand was tried and given up.
    assert facts.interfaces == ["Socket [0]eth0:10.0.0.1<0>"]
    assert facts.algorithms["AllReduce", 1 << 26] == "RING/SIMPLE"
    assert facts.channels == {"collective": 24, "nvls": 0, "sendrecv": 32}
    assert facts.settings["NCCL_NVLS_ENABLE"] == "0"
    assert facts.warnings == []


def test_networks_by_channel() -> None:
    """The forms of NCCL's source for two hosts; numbers of networks and proxies do not make them different ways."""
    head = "node-b:77:81 [1] NCCL INFO "
    facts = parse_log(
        [
            head + "Channel 00/1 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA",
            head + "Channel 01/1 : 0[0] -> 1[1] [send] via NET/IB/3(1)/GDRDMA",
            head + "Channel 00/1 : 1[1] -> 0[0] [receive] via NET/Socket/0",
            head + "Channel 02/0 : 0[0] -> 1[1] via SHM/direct/direct",
            "node-b:77:81 [1] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4> failed",
            "not a line of NCCL",
        ]
    )
    assert facts.sendrecv == {
        "0 -> 1": Counter({"NET/IB/GDRDMA": 2}),
        "1 -> 0": Counter({"NET/Socket": 1}),
    }
    assert facts.transport == "NET/IB/GDRDMA + NET/Socket"
    assert facts.collectives == {"0 -> 1": Counter({"SHM/direct/direct": 1})}
    assert facts.warnings == ["socketStartConnect: Connect to 10.0.0.2<4> failed"]


def test_an_empty_log_says_nothing() -> None:
    facts = parse_log([])
    assert (facts.version, facts.transport, facts.sendrecv) == ("", "", {})


def test_half_a_rendezvous_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for address, rank in ((None, 1), ("10.0.0.1:5000", None)):
        with pytest.raises(SystemExit) as end:
            examine_nccl(rendezvous=address, rank=rank, json_file=None)
        assert end.value.code == 2
        assert "go together" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no GPU is visible" in str(nccl_unusable(ranks_here=2))
    assert examine_nccl(rendezvous=None, rank=None, json_file=None) == 1
    assert "NCCL moves data between GPUs only" in " ".join(capsys.readouterr().out.split())


def test_with_one_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert "NCCL refuses two ranks on one GPU" in str(nccl_unusable(ranks_here=2))
    assert nccl_unusable(ranks_here=1) is None
