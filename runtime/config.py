# SPDX-License-Identifier: Apache-2.0
"""All settings of a role, each with its default and its help text, written once.

The command line is generated from these fields (frontend/cli.py). This is the only file that reads environment
variables. A wrong value raises ConfigError before anything is started.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvrail.runtime.config_checks import LANES, check_lane, check_ranges, is_base_url, is_http_url, is_origin
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.role_settings import check_roles

__all__ = [
    "Attention",
    "LaunchConfig",
    "child_environment",
    "environment",
    "is_loopback",
    "keep_compiled_attention",
    "mps_sign",
    "rank_environment",
    "runtime_directory",
    "ucx_overrides",
]

Role = Literal["pe", "ce", "single"]
Attention = Literal["auto", "flashinfer", "torch"]
DEFAULT_PORT = {"ce": 8888, "single": 8888, "pe": 8889}
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One role on one host: a front process and `dp` rank processes."""

    role: Role = field(
        metadata={"help": "pe (prefill engine), ce (completion engine) or single (both in one)"}
    )
    model: str = field(
        metadata={"help": "folder or GGUF file of a model, or a hub name when there is a network"}
    )
    engine: Literal["embedded", "vllm"] = _setting(
        "embedded", "embedded, or vllm (must be installed; arguments for vLLM itself go behind a --)"
    )
    served_model_name: str | None = _setting(None, "name that clients use (default: last part of --model)")
    dp: int = _setting(1, "rank processes, one copy of the model each")
    host: str = _setting("127.0.0.1", "address that HTTP listens on")
    port: int | None = _setting(None, "port of HTTP (default: 8888 for ce and single, 8889 for pe; 0: any)")
    kv_host: str = _setting("127.0.0.1", "address (or interface) that links and UCX listen on")
    kv_port: int | None = _setting(
        None,
        "with --engine vllm: first port, one for links of each GPU and one for calls (default: any that are free)",
    )
    pe_url: tuple[str, ...] = _setting((), "URL of a prefill engine; may be given several times")
    max_model_len: int | None = _setting(
        None, "longest prompt plus answer in tokens (default: the model's own)"
    )
    max_num_seqs: int | None = _setting(
        None, "sequences that decode together (default: 64; with --engine vllm what vLLM chooses)"
    )
    max_num_batched_tokens: int | None = _setting(
        None,
        "token budget of one step: prompts are cut into chunks (default: 2048; with --engine vllm what vLLM chooses)",
    )
    page_tokens: int = _setting(128, "tokens in a page, 16 to 256; both sides must agree")
    kv_pages: int | None = _setting(None, "pages in the pool (instead of --kv-memory-gb)")
    kv_memory_gb: float | None = _setting(
        None,
        "GiB for pages and state slots (default: 1 on a CPU, half of what the model leaves free on a GPU)",
    )
    state_slots: int | None = _setting(
        None,
        "sequences with sliding-window state, for models that have it (default: --max-num-seqs, if they fit)",
    )
    hicache_size_gb: float | None = _setting(
        None,
        "GiB of host memory for the prefix cache of each rank (default for a pe: 32 on a GPU, at most half of what the "
        "host has free, and 1 on a CPU; else 0; 0: none)",
    )
    hicache_state_slots: int | None = _setting(
        None,
        "states in the host cache, for models with sliding windows (default: as many as half of it holds, at most "
        "4096 on a GPU and 256 on a CPU)",
    )
    hicache_state_interval: int = _setting(
        8, "pages of a prompt between the states that the host cache keeps; one more at its end"
    )
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16")
    device: str = _setting(
        "cpu",
        "where model and pages live: cpu, cuda, or cuda:N (rank i of --dp takes the i-th GPU from there)",
    )
    attention: Literal["auto", "flashinfer", "torch"] = _setting(
        "auto", "which attention: flashinfer (GPU, 16 bits), torch, or the first of these that serves"
    )
    cuda_graphs: bool = _setting(
        True, "replay decoding and other short steps as CUDA graphs, where attention is FlashInfer's"
    )
    threads: int | None = _setting(
        None, "threads of arithmetic in each rank (default: OMP_NUM_THREADS, else this host's cores / --dp)"
    )
    routing: Literal["affinity", "least-loaded", "prefix"] = _setting(
        "affinity",
        "how ranks are picked: one for each conversation, the idlest, or who has most of the prompt",
    )
    thinking_mode: Literal["chat", "thinking"] = _setting(
        "chat", "default of enable_thinking in the chat template"
    )
    chat_template: str | None = _setting(None, "file with a chat template to use instead of the model's own")
    trust_remote_code: bool = _setting(
        False, "run the Python code with which some models render prompts; it comes with the weights"
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "pythonic",
        "mistral",
        "deepseek_v3",
        "deepseek_v32",
    ] = _setting("auto", "how the model writes tool calls (auto: by its chat template)")
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"] = _setting(
        "auto", "how the model marks its thinking (auto: by its chat template)"
    )
    tokenizer_backend: Literal["auto", "hf", "fastokens"] = _setting(
        "auto", "hf, fastokens (several times faster), or fastokens where it is installed (auto)"
    )
    tokenizer_verify_rate: float = _setting(
        0.01, "share of texts that fastokens and hf both tokenise; a difference ends the use of fastokens"
    )
    lane: Literal["auto", "shm", "peer", "stream", "put"] = _setting(
        "auto",
        "how pages travel: shared memory, copies into the peer's GPU memory, TCP, UCX put, or the best that works",
    )
    put_transport: Literal["auto", "cma", "tcp"] = _setting(
        "auto", "which UCX transport lane put may use (auto for pages in GPU memory)"
    )
    require_lane: str | None = _setting(None, f"refuse links that do not get this lane ({LANES})")
    local_prefill: Literal["auto", "never", "always"] = _setting(
        "auto", "prefill here when no prefill engine can (auto), never, or always"
    )
    local_prefill_max_tokens: int = _setting(0, "with auto, prompts up to this length are prefilled here")
    verify_kv: float = _setting(0.01, "share of requests whose pages are checked by checksum, 0 to 1")
    ticket_ttl_s: float = _setting(
        30.0, "seconds that a ticket lives without progress; more than the longest step of the model takes"
    )
    link_share: float = _setting(
        0.25, "largest share of the pool that one link may hold in tickets and quarantine"
    )
    heartbeat_s: float = _setting(0.25, "seconds between heartbeats; four missed ones make a link suspect")
    spin_us: int | None = _setting(
        None, "µs that the progress thread spins before it sleeps (default by cores)"
    )
    copy_threads: int = _setting(1, "threads that copy for lane shm")
    token_file: str | None = _setting(None, "file with the cluster token; required off loopback")
    ignore_unknown_fields: bool = _setting(
        False, "leave out fields of requests that are not known (logged once each) instead of refusing them"
    )
    api_key_file: str | None = _setting(None, "file with API keys, one a line, for the OpenAI routes")
    ssl_certfile: str | None = _setting(None, "certificate chain (PEM): HTTP is served over TLS")
    ssl_keyfile: str | None = _setting(None, "private key (PEM) of --ssl-certfile")
    ssl_ca_certs: str | None = _setting(
        None, "certificates (PEM) that an https --pe-url must lead to (default: those of the system)"
    )
    runtime_dir: str | None = _setting(
        None, "folder for sockets and the token (default: a private one per user)"
    )
    ucx: str | None = _setting(
        None, "which UCX: wheel, system, or a folder (default: KVRAIL_UCX, else wheel)"
    )
    max_queue: int = _setting(256, "requests that may wait; beyond it 429")
    max_prompt_tokens: int | None = _setting(
        None, "longest prompt (default: as much as --max-model-len leaves room for)"
    )
    max_body_mb: float = _setting(32.0, "largest body of a request in MiB; beyond it 413")
    request_timeout_s: float | None = _setting(
        None, "seconds that a request may take, waiting included; beyond it 504 (default: any time)"
    )
    cors_origin: tuple[str, ...] = _setting(
        (), "origin whose pages may call this server from a browser, or *; may be given several times"
    )
    access_log: Literal["json", "none"] = _setting(
        "json", "one line of JSON for each HTTP request, without any of its text (json), or none"
    )
    otlp_endpoint: str | None = _setting(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP, as http://127.0.0.1:4318) for traces of requests",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least level that is logged")
    vllm_args: tuple[str, ...] = _setting((), "with --engine vllm: arguments for vLLM itself, behind a --")

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the flag."""
        _require(self.role in DEFAULT_PORT, f"--role {self.role}: must be pe, ce or single")
        _require(
            self.engine == "vllm" or not self.vllm_args,
            f"{' '.join(self.vllm_args)}: arguments behind a -- are for --engine vllm",
        )
        check_roles(self)
        _require(
            self.kv_port is None or (self.engine == "vllm" and 0 < self.kv_port < 65536),
            "--kv-port is for --engine vllm: 1 to 65535",
        )
        check_ranges(self)
        _require(0 <= self.resolved_port < 65536, f"--port {self.port}: 0 to 65535")
        for url in self.pe_url:
            _require(is_base_url(url), f"--pe-url {url}: a URL such as http://127.0.0.1:8889")
        for origin in self.cors_origin:
            _require(
                origin == "*" or is_origin(origin),
                f"--cors-origin {origin}: * or what browsers send, such as https://chat.example.org",
            )
        _require(
            self.kv_pages is None or self.kv_memory_gb is None, "give --kv-pages or --kv-memory-gb, not both"
        )
        _require(
            self.otlp_endpoint is None or is_http_url(self.otlp_endpoint),
            f"--otlp-endpoint {self.otlp_endpoint}: a URL such as http://127.0.0.1:4318",
        )
        # Progress comes with heartbeats: some must fit into the life of a ticket, or none would live.
        _require(
            4 * self.heartbeat_s <= self.ticket_ttl_s <= 3600,
            f"--ticket-ttl-s must be between four heartbeats ({4 * self.heartbeat_s:g}) and 3600",
        )
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            f"--dtype {self.dtype}: must be auto, float32, bfloat16 or float16",
        )
        _require(
            _DEVICE.fullmatch(self.device) is not None, f"--device {self.device}: must be cpu, cuda or cuda:N"
        )
        on_gpu = self.device != "cpu"
        _require(
            not on_gpu or self.put_transport == "auto",
            f"--put-transport {self.put_transport} is for host memory: UCX cannot put from or into a GPU over it alone",
        )
        _require(
            not on_gpu or self.lane not in ("shm", "stream"),
            f"--lane {self.lane} is for host memory, not for --device {self.device}",
        )
        _require(
            on_gpu or self.lane != "peer" or self.role == "pe",
            "--lane peer on a ce needs its pages in GPU memory: give --device cuda",
        )
        _require(
            self.attention in ("auto", "torch") or (self.attention == "flashinfer" and on_gpu),
            f"--attention {self.attention}: must be auto or torch, or with --device cuda flashinfer",
        )
        check_lane(self.require_lane, self.lane, self.put_transport)
        _require(
            self.role != "ce" or bool(self.pe_url) or self.local_prefill != "never",
            "--local-prefill never needs at least one --pe-url",
        )
        _require(
            (self.ssl_certfile is None) == (self.ssl_keyfile is None),
            "--ssl-certfile and --ssl-keyfile go together",
        )
        for flag, host in (("--host", self.host), ("--kv-host", self.kv_host)):
            _require(
                is_loopback(host) or self.token_file is not None,
                f"{flag} {host} is not loopback: give the cluster token with --token-file",
            )

    @property
    def resolved_port(self) -> int:
        """The HTTP port: as given, or the role's default."""
        return DEFAULT_PORT[self.role] if self.port is None else self.port

    @property
    def resolved_max_num_seqs(self) -> int:
        """Of the embedded engine: as given, or its default."""
        return 64 if self.max_num_seqs is None else self.max_num_seqs

    @property
    def resolved_max_num_batched_tokens(self) -> int:
        """Of the embedded engine: as given, or its default."""
        return 2048 if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def device_of(self, rank: int) -> int | None:
        """The ordinal of the CUDA device that this rank uses; None for the CPU."""
        if self.device == "cpu":
            return None
        return int(self.device.partition(":")[2] or 0) + rank

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf") or self.model

    @property
    def resolved_hicache_size_gb(self) -> float:
        """GiB of each rank's host prefix cache; 0: it has none."""
        if self.hicache_size_gb is not None:
            return self.hicache_size_gb
        if self.role != "pe":
            return 0.0
        return 1.0 if self.device == "cpu" else 32.0

    @property
    def resolved_spin_us(self) -> int:
        """Spin for 50 µs where cores are plenty; on small hosts a spinning thread steals from the model."""
        return (50 if (os.cpu_count() or 1) > 4 else 0) if self.spin_us is None else self.spin_us

    @property
    def resolved_threads(self) -> int | None:
        """Threads of arithmetic in a rank, so that the ranks together do not want more than the host has.

        None: OMP_NUM_THREADS is set, which torch obeys by itself.
        """
        if self.threads is not None or os.environ.get("OMP_NUM_THREADS"):
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // self.dp)

    def resolved_runtime_dir(self) -> Path:
        """Folder (mode 0700, made on demand by its users) for sockets and the default token."""
        return runtime_directory(self.runtime_dir)


def runtime_directory(choice: str | None) -> Path:
    """`choice`, or the folder that this user's engines on this machine share."""
    if choice:
        return Path(choice)
    base = environment("XDG_RUNTIME_DIR")
    return Path(base) / "kvrail" if base else Path("/tmp") / f"kvrail-{os.getuid()}"


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(text)


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def environment(
    name: Literal["KVRAIL_UCX", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"],
) -> str | None:
    """The environment variables that are read anywhere, and the only place that reads them."""
    return os.environ.get(name) or None


def child_environment(**defaults: str) -> dict[str, str]:
    """This process's environment for a child, with `defaults` for the variables that it lacks."""
    return {**defaults, **os.environ}


def rank_environment() -> dict[str, str]:
    """The environment of a rank process: its OpenMP threads wait for each other asleep after a short spin.

    The default spins for milliseconds. Where a PE and a CE share cores, or anything else runs beside them, the
    spinning thread holds the core that the thread it waits for needs: decoding becomes several times slower.
    """
    if os.environ.get("OMP_WAIT_POLICY"):
        return child_environment()
    return child_environment(GOMP_SPINCOUNT="2000")


def mps_sign() -> str:
    """What says that CUDA programs of this user share GPUs through an MPS server, for people; "" when nothing does."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    # The daemon's pipe: it takes the file along when it quits.
    return f"its control pipe is in {folder}" if (Path(folder) / "control").exists() else ""


def keep_compiled_attention(folder: Path) -> None:
    """Have FlashInfer keep the kernels that it compiles under `folder`, unless the user has said where.

    Works until FlashInfer is imported: it reads the variable then.
    """
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder))


def ucx_overrides() -> dict[str, str]:
    """UCX settings that the user made by UCX_<NAME> variables: they win over ours."""
    return {name.removeprefix("UCX_"): value for name, value in os.environ.items() if name.startswith("UCX_")}
