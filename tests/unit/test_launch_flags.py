# SPDX-License-Identifier: Apache-2.0
"""Flags that cannot work are refused in one line that names them, before anything is started."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.frontend import cli
from kvrail.frontend.launch import _with_model_folder
from kvrail.runtime.config import LaunchConfig, mps_sign, rank_environment
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.machine_check import check_machine
from kvrail.runtime.role_settings import roles_of

GOOD: dict[str, Any] = {"role": "ce", "model": "m"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"role": "both"}, "--role both: must be pe, ce or single"),
    ({"dp": 0}, "--dp must be"),
    ({"port": 65536}, "--port 65536: 0 to 65535"),
    ({"page_tokens": 8}, "--page-tokens must be between 16 and 256"),
    ({"page_tokens": 257}, "--page-tokens must be between 16 and 256"),
    ({"kv_pages": 1}, "--kv-pages"),
    ({"kv_memory_gb": 0.0}, "--kv-memory-gb"),
    ({"kv_memory_gb": 1.0, "kv_pages": 9}, "--kv-pages or --kv-memory-gb, not both"),
    ({"verify_kv": 1.5}, "--verify-kv"),
    ({"link_share": 0.0}, "--link-share"),
    ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens"),
    ({"dtype": "int4"}, "--dtype int4"),
    ({"state_slots": 0}, "--state-slots must be between 1 and 2147483647"),
    ({"role": "pe", "hicache_state_slots": 2**31}, "--hicache-state-slots must be between 1 and 2147483647"),
    ({"pe_url": ("127.0.0.1:8889",)}, "--pe-url 127.0.0.1:8889: a URL such as http://"),
    ({"pe_url": ("http://127.0.0.1:8889?x=1",)}, "--pe-url http://127.0.0.1:8889?x=1: a URL such as"),
    ({"pe_url": ("http://me:secret@127.0.0.1:8889",)}, "--pe-url http://me:secret@127.0.0.1:8889: a URL"),
    (
        {"cors_origin": ("example.org",)},
        "--cors-origin example.org: * or what browsers send, such as https://",
    ),
    (
        {"cors_origin": ("*", "https://example.org/")},
        "--cors-origin https://example.org/: * or what browsers",
    ),
    ({"threads": 1025}, "--threads must be between 1 and 1024"),
    ({"max_num_seqs": 10**11}, "--max-num-seqs must be between 1 and 65536"),
    ({"max_num_batched_tokens": 2**24 + 1}, "--max-num-batched-tokens must be between 16 and 16777216"),
    ({"max_model_len": 2**31}, "--max-model-len must be between 2 and 2147483647"),
    ({"role": "pe", "hicache_state_interval": 0}, "--hicache-state-interval must be between 1 and"),
    ({"max_queue": -1}, "--max-queue must be between 0 and 1048576"),
    ({"heartbeat_s": float("nan")}, "--heartbeat-s must be between 0.01 and 60"),
    ({"max_body_mb": float("inf")}, "--max-body-mb must be above 0 and at most 4096"),
    ({"request_timeout_s": -1.0}, "--request-timeout-s must be above 0 and at most 604800"),
    ({"local_prefill": "never"}, "--local-prefill never needs at least one --pe-url"),
    ({"host": "0.0.0.0"}, "--host 0.0.0.0 is not loopback: give the cluster token with --token-file"),
    ({"host": "::"}, "--host :: is not loopback"),
    ({"host": ""}, "--host  is not loopback"),
    ({"kv_host": "eth0"}, "--kv-host eth0 is not loopback: give the cluster token with --token-file"),
    (
        {"require_lane": "rdma"},
        "--require-lane rdma: must be shm, peer, stream, put, put/cma, put/tcp or put/cuda_ipc",
    ),
    (
        {"require_lane": "shm/cma"},
        "--require-lane shm/cma: must be shm, peer, stream, put, put/cma, put/tcp or put/cuda_ipc",
    ),
    ({"require_lane": "shm", "lane": "put"}, "--require-lane shm cannot hold with --lane put"),
    ({"require_lane": "stream/tcp"}, "--require-lane stream/tcp: must be shm, peer, stream, put"),
    ({"require_lane": "stream", "lane": "put"}, "--require-lane stream cannot hold with --lane put"),
    ({"device": "cuda", "lane": "stream"}, "--lane stream is for host memory, not for --device cuda"),
    ({"require_lane": "peer", "lane": "put"}, "--require-lane peer cannot hold with --lane put"),
    ({"attention": "flashinfer"}, "--attention flashinfer: must be auto or torch, or with --device cuda"),
    ({"device": "gpu"}, "--device gpu: must be cpu, cuda or cuda:N"),
    ({"device": "cuda:"}, "--device cuda:: must be cpu, cuda or cuda:N"),
    ({"device": "cuda:-1"}, "--device cuda:-1: must be cpu, cuda or cuda:N"),
    ({"device": "cuda", "lane": "shm"}, "--lane shm is for host memory, not for --device cuda"),
    ({"device": "cuda", "put_transport": "tcp"}, "--put-transport tcp is for host memory"),
    ({"lane": "peer"}, "--lane peer on a ce needs its pages in GPU memory: give --device cuda"),
    ({"require_lane": "put/cma", "put_transport": "tcp"}, "cannot hold with --put-transport tcp"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_work_is_named(wrong: dict[str, Any], said: str) -> None:
    LaunchConfig(**GOOD)
    with pytest.raises(ConfigError) as refusal:
        LaunchConfig(**{**GOOD, **wrong})
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_number_has_a_range() -> None:
    """Of all settings that are numbers: a new one must not come without. (--port, --kv-port and times are apart.)"""
    others = {"port", "kv_port", "ticket_ttl_s"}
    for field in dataclasses.fields(LaunchConfig):
        if not re.match(r"(int|float)\b", str(field.type)) or field.name in others:
            continue
        for value in (-1, float("nan"), 10**18):
            with pytest.raises(ConfigError, match="--" + field.name.replace("_", "-") + " must be"):
                LaunchConfig(**{**GOOD, "role": roles_of(field.name)[0], field.name: value})


@pytest.mark.parametrize("origin", ["*", "https://chat.example.org", "http://[::1]:8080"])
def test_origins_that_browsers_send(origin: str) -> None:
    assert LaunchConfig(**GOOD, cors_origin=(origin,)).cors_origin == (origin,)


@pytest.mark.parametrize("lane", ["shm", "put", "stream", "put/cma", "put/tcp", "put/rc_mlx5"])
def test_lanes_that_may_be_required(lane: str) -> None:
    assert LaunchConfig(**GOOD, require_lane=lane).require_lane == lane
    assert LaunchConfig(**GOOD, require_lane=lane, lane=lane.partition("/")[0]).require_lane == lane  # type: ignore[arg-type]


@pytest.mark.parametrize("lane", ["peer", "put/cuda_ipc"])
def test_lanes_of_gpus_that_may_be_required(lane: str) -> None:
    config = LaunchConfig(**GOOD, device="cuda", require_lane=lane, lane=lane.partition("/")[0])  # type: ignore[arg-type]
    assert config.require_lane == lane


def test_a_cpu_pe_may_ask_for_the_kernel() -> None:
    assert LaunchConfig(role="pe", model="m", lane="peer").device_of(0) is None


def test_only_a_pe_has_a_host_cache_unless_told() -> None:
    assert LaunchConfig(role="pe", model="m").resolved_hicache_size_gb == 1.0
    assert LaunchConfig(role="pe", model="m", device="cuda:1").resolved_hicache_size_gb == 32.0
    assert LaunchConfig(**GOOD, device="cuda").resolved_hicache_size_gb == 0.0
    assert (
        LaunchConfig(role="pe", model="m", device="cuda", hicache_size_gb=0.0).resolved_hicache_size_gb == 0.0
    )
    assert LaunchConfig(role="single", model="m", hicache_size_gb=2.0).resolved_hicache_size_gb == 2.0


def test_ranks_spread_over_the_gpus_from_the_named_one_on() -> None:
    assert [LaunchConfig(**GOOD, device="cuda", dp=3).device_of(rank) for rank in range(3)] == [0, 1, 2]
    assert [LaunchConfig(**GOOD, device="cuda:2", dp=2).device_of(rank) for rank in range(2)] == [2, 3]
    assert LaunchConfig(**GOOD, dp=2).device_of(1) is None


def test_mps_is_seen_by_its_control_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_sign() == ""
    (tmp_path / "control").touch()
    assert str(tmp_path) in mps_sign()


def run(*flags: str, folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvrail.frontend.cli", "launch", *flags, "--runtime-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "60"},
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_one_line_whatever_the_terminal_s_width(tmp_path: Path) -> None:
    status, said = run("--role", "pe", "--model", "m", "--host", "0.0.0.0", folder=tmp_path)
    assert (status, said) == (
        2,
        ["runtime: --host 0.0.0.0 is not loopback: give the cluster token with --token-file"],
    )


def test_a_token_that_others_can_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    status, said = run("--role", "pe", "--model", "m", "--token-file", str(token), folder=tmp_path)
    assert (status, len(said)) == (2, 1)
    assert "others can read it: chmod 600" in said[0]


def broken_model(folder: Path) -> Path:
    """What looks like a checkpoint from outside."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_what_only_a_rank_can_refuse_is_refused_with_the_same_status(tmp_path: Path) -> None:
    model = broken_model(tmp_path / "model")
    # Not tmp_path: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvrail-t") as folder:
        status, said = run("--role", "pe", "--model", str(model), "--port", "0", folder=Path(folder))
    assert status == 2, said
    assert any("rank 0 ended with exit status 2" in line for line in said)


@pytest.mark.parametrize(
    ("visible", "start", "wrong"),
    [
        (2, 0, ""),
        (1, 0, "for --dp 2: needs GPU 1, and 1 are visible"),
        (0, 100, "and 0 are"),
        (9, 803, "error 803"),
    ],
)
def test_gpus_are_counted_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, visible: int, start: int, wrong: str
) -> None:
    def count(number: Any) -> int:
        number._obj.value = visible
        return 0

    _have_driver(monkeypatch, start, count)
    config = LaunchConfig(**GOOD, device="cuda", dp=2)
    if wrong:
        with pytest.raises(ConfigError, match=wrong):
            check_machine(config)
    else:
        check_machine(config)
    check_machine(LaunchConfig(**GOOD))


def _have_driver(monkeypatch: pytest.MonkeyPatch, start: int, count: Any) -> None:
    """A driver whose GPUs have 80 GiB each."""

    def size(number: Any, device: int) -> int:
        number._obj.value = 80 << 30
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: start, cuDeviceGetCount=count, cuDeviceTotalMem_v2=size)
    monkeypatch.setattr(
        "kvrail.runtime.machine_check.ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: driver})
    )


def test_pools_that_no_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(number: Any) -> int:
        number._obj.value = 1
        return 0

    _have_driver(monkeypatch, 0, count)
    check_machine(LaunchConfig(**GOOD, device="cuda", kv_memory_gb=79))
    with pytest.raises(ConfigError, match=r"--kv-memory-gb 81: the GPU has 80\.0 GiB; take less"):
        check_machine(LaunchConfig(**GOOD, device="cuda", kv_memory_gb=81))


def test_compiled_attention_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(number: Any) -> int:
        number._obj.value = 1
        return 0

    _have_driver(monkeypatch, 0, count)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--attention flashinfer: FlashInfer is not installed: install"):
        check_machine(LaunchConfig(**GOOD, device="cuda", attention="flashinfer"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"hicache_size_gb": 900000.0}, "--hicache-size-gb 900000: this machine has "),
        ({"dp": 2, "kv_memory_gb": 900000.0}, "--kv-memory-gb 900000 for each of --dp 2: this machine has "),
        # Of a net for documentation: no machine has it.
        ({"token_file": "t", "kv_host": "198.51.100.7"}, "--kv-host 198.51.100.7: no network interface"),
        ({"token_file": "t", "kv_host": "no..host"}, "--kv-host no..host: "),
        ({"token_file": "t", "kv_host": "0.0.0.0"}, "--kv-host 0.0.0.0: no network interface"),
        ({"token_file": "t", "kv_host": "::"}, "--kv-host ::: no network interface"),
        (
            {"token_file": "t", "kv_host": "fe80::1"},
            "--kv-host fe80::1: an IPv6 link-local address needs its interface",
        ),
    ],
)
def test_what_this_machine_lacks(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_machine(LaunchConfig(role="pe", model="m", **asked))
    assert said in str(refusal.value)


def test_vllm_is_not_called_at_an_address_that_needs_an_interface() -> None:
    table = Path("/proc/net/if_inet6")
    lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    local = [
        f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))}%{line[5]}"
        for line in lines
        if line[3] == "20"
    ]
    if not local:
        pytest.skip("no interface here has an IPv6 link-local address")
    with pytest.raises(
        ConfigError, match=f"--kv-host {local[0]}: with --engine vllm prefill engines are called there"
    ):
        check_machine(LaunchConfig(**GOOD, kv_host=local[0], token_file="t", engine="vllm"))


def test_a_host_with_an_address_of_a_kind_that_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` has ::1 where there is no IPv6."""
    lacking, there = socket.AF_DECnet, socket.AF_INET
    with pytest.raises(OSError, match="family"), socket.socket(lacking, socket.SOCK_STREAM):
        pass
    found = [(family, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)) for family in (lacking, there)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    check_machine(LaunchConfig(**GOOD, kv_host="localhost"))


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--ucx", "/no/such/folder", "--ucx: UCX cannot be loaded from /no/such/folder"),
        ("--kv-memory-gb", "900000", "--kv-memory-gb 900000: this machine has "),
    ],
)
def test_it_is_said_before_listening(flag: str, value: str, said: str, tmp_path: Path) -> None:
    model = broken_model(tmp_path / "model")
    status, told = run("--role", "pe", "--model", str(model), "--port", "0", flag, value, folder=tmp_path)
    assert (status, len(told)) == (2, 1), told
    assert said in told[0]


def test_a_missing_ucx_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by loading it: a test may have loaded the wheel's into this process.
    if ctypes.util.find_library("ucp"):
        pytest.skip("there is a system UCX")
    monkeypatch.setenv("KVRAIL_UCX", "system")
    status, said = run("--role", "pe", "--model", str(broken_model(tmp_path / "model")), folder=tmp_path)
    assert (status, len(said)) == (2, 1)
    assert "KVRAIL_UCX: UCX cannot be loaded from the system" in said[0]


def test_a_gpu_that_is_not_there_is_refused_before_listening(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    model = broken_model(tmp_path / "model")
    status, said = run("--role", "pe", "--model", str(model), "--device", "cuda", folder=tmp_path)
    assert (status, len(said)) == (2, 1)
    assert "--device cuda: this machine has no NVIDIA driver" in said[0]


def test_a_folder_too_deep_for_unix_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    model = broken_model(tmp_path / "model")
    status, said = run("--role", "pe", "--model", str(model), "--port", "0", folder=deep)
    assert (status, len(said)) == (2, 1)
    assert "give a shorter --runtime-dir" in said[0]


def test_help_has_every_setting_in_a_named_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.app(["launch", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(LaunchConfig):
        assert ("-- ARGUMENT" if field.name == "vllm_args" else "--" + field.name.replace("_", "-")) in text
    for group in ("Role and model", "Addresses", "Links and lanes"):
        assert group in text


def test_ranks_share_the_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [_threads(dp=dp) for dp in (1, 3, 16)] == [8, 2, 1]
    assert _threads(dp=4, threads=5) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _threads(dp=4) is None
    assert _threads(dp=4, threads=5) == 5
    with pytest.raises(ConfigError, match="--threads must be between 1 and 1024"):
        _threads(threads=0)


def _threads(**settings) -> int | None:
    return LaunchConfig(role="single", model="m", **settings).resolved_threads


def test_ranks_do_not_spin_unless_told_to(monkeypatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment()["GOMP_SPINCOUNT"] == "2000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in rank_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert rank_environment()["GOMP_SPINCOUNT"] == "7"


def test_a_missing_model_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="--model /no/such: no such file or folder"):
        _with_model_folder(LaunchConfig(role="single", model="/no/such"))
