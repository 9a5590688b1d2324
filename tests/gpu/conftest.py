# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a CUDA device; without one they skip and say why."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.cuda_peer import CudaPeer
from gpu.cuda_rig import CudaModels
from kit.failed_frames import pytest_runtest_makereport
from kit.remote import Remote
from kvrail.kernels.page_copy import KernelsUnavailable, PageCopier, PageKernels
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.model import PagedModel
from kvrail.transfer.cuda import open_device
from kvrail.transfer.errors import CudaFailed

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaDevice


# A tensor over a pool must not live on in the frames of a failed test, or the pool cannot be closed.
__all__ = ["pytest_runtest_makereport"]

_PEER = Path(__file__).with_name("cuda_peer.py")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PageKernels:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    cache: Path = tmp_path_factory.mktemp("cubins")
    try:
        return PageKernels.load(0, cache)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def copier(kernels: PageKernels) -> PageCopier:
    """Launches on torch's default stream, in order with what the tests do through torch."""
    return kernels.on(torch.cuda.current_stream(kernels.device))


@pytest.fixture
def peer(kernels: PageKernels) -> int:
    """A second device whose memory the first one can reach."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs with peer access")
    from cuda.bindings import runtime

    runtime.cudaSetDevice(kernels.device)
    (status,) = runtime.cudaDeviceEnablePeerAccess(1, 0)
    assert status in (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
    return 1


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native-cubins"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, kernel_cache: str) -> CudaModels:
    """The tiny models of tests/engine on a GPU, and what transformers says on the CPU: each made once for all files."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    # So small are they that threads of arithmetic would wait for each other most of the time.
    torch.set_num_threads(1)
    return CudaModels(tmp_path_factory.mktemp("models"), Path(kernel_cache))


@pytest.fixture
def cuda(kernel_cache: str) -> CudaDevice:
    """Device 0 of the native module, with kernels."""
    try:
        return open_device(0, Path(kernel_cache))
    except CudaFailed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared_remotes() -> Iterator[dict[int, Remote]]:
    """A process for each GPU, kept over the tests: starting one takes seconds."""
    remotes: dict[int, Remote] = {}
    yield remotes
    for remote in remotes.values():
        remote.end()


@pytest.fixture
def make_gpu_pair(
    cuda: CudaDevice, kernel_cache: str, shared_remotes: dict[int, Remote]
) -> Iterator[Callable[..., tuple[Any, Remote]]]:
    """make_gpu_pair(device, **options) → (end here on GPU 0, end in another process on GPU `device`), joined.

    `mortal`: a process of its own, which the test may kill. `put`: import for puts, too.
    """
    with ExitStack() as stack:

        def make(
            device: int = 0, *, mortal: bool = False, put: bool = True, **options: Any
        ) -> tuple[Any, Remote]:
            if device and not _has_device(device):
                pytest.skip("needs two GPUs")
            if mortal:
                remote = Remote(_PEER)
                stack.callback(remote.end)
            else:
                remote = shared_remotes.get(device) or shared_remotes.setdefault(device, Remote(_PEER))
                # After our end is closed, which is the proof that it has nothing of theirs mapped.
                stack.callback(remote.do, "close")
            theirs = remote.do("open", device=device, cache=kernel_cache, **options)
            here = CudaPeer(0, kernel_cache, **options)
            stack.callback(here.close)
            here.join(theirs, put)
            remote.do("join", card=here.card(), put=put)
            # Both have the other's memory mapped: first both unmap, then each frees its own.
            stack.callback(_part, here, None if mortal else remote)
            return here, remote

        yield make


def _part(here: CudaPeer, remote: Remote | None) -> None:
    if remote is not None:
        remote.do("fence")
    here.fence()


def _has_device(ordinal: int) -> bool:
    from kvrail.transfer import _ucx

    try:
        _ucx.CudaDevice(ordinal)
    except CudaFailed:
        return False
    return True


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def load(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PagedModel]:
    """load(cuda_graphs=…, decodes=…): a small Llama over FlashInfer, vocabulary 997, pages of 16 tokens."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=997,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def make(**options: Any) -> PagedModel:
        return PagedModel.load(
            open_checkpoint(str(folder)),
            "bfloat16",
            16,
            device="cuda",
            attention="flashinfer",
            **options,
        )

    return make


@pytest.fixture(scope="session")
def model(load: Callable[..., PagedModel]) -> PagedModel:
    made = load()
    assert made._graphs is not None
    return made


@pytest.fixture(scope="session")
def eager(load: Callable[..., PagedModel]) -> PagedModel:
    made = load(cuda_graphs=False)
    assert made._graphs is None
    return made
