# SPDX-License-Identifier: Apache-2.0
"""Device code for one architecture: compiled by NVRTC at run time, kept on disk, never needing nvcc."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["KernelsUnavailable", "cubin", "device_architecture", "require_cuda"]

_log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


class KernelsUnavailable(RuntimeError):
    """The CUDA kernels cannot be compiled or run here; the message says what is missing."""


def require_cuda() -> Any:
    """The module `cuda.core`. Imported on first use: machines without a GPU need not have it.

    Raises KernelsUnavailable naming the extra to install.
    """
    try:
        import cuda.core
    except ImportError as error:
        raise KernelsUnavailable(
            "the CUDA kernels need cuda.core: install kvrail[cuda13], or kvrail[cuda12] with a CUDA 12 torch "
            f"({error})"
        ) from error
    return cuda.core


def device_architecture(device: int) -> str:
    """The architecture of CUDA device number `device`, as "sm_90". Raises KernelsUnavailable without a driver."""
    core = require_cuda()
    try:
        major, minor = core.Device(device).compute_capability
    except Exception as error:  # cuda.core and its library finder share no exception class
        raise KernelsUnavailable(f"CUDA device {device} cannot be used: {error}") from error
    return f"sm_{major}{minor}"


def cubin(source: Path, architecture: str, cache: Path | None) -> bytes:
    """Machine code of the CUDA C++ file `source` for `architecture`.

    With a `cache` folder (made if missing) the code is kept there, under a name that changes with the source, the
    architecture and the compiler's version. Many processes may share the folder. A file cut short or altered by
    accident is compiled again; a folder that cannot be written costs only the time of compiling.
    """
    text = source.read_text()
    version = _compiler_version()
    if cache is None:
        return _compile(text, source.name, architecture)
    key = hashlib.sha256("\0".join((version, architecture, text)).encode()).hexdigest()[:32]
    kept = cache / f"{source.stem}-{architecture}-{key}.cubin"
    code = _read(kept)
    if code is None:
        code = _compile(text, source.name, architecture)
        _write(kept, code)
    return code


def _compiler_version() -> str:
    require_cuda()
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the library finder's own class, which older releases lack
        raise KernelsUnavailable(
            f"the CUDA kernels need NVRTC, which comes with a CUDA torch: {error}"
        ) from error
    return f"nvrtc {major}.{minor} {int(status)}"


def _compile(text: str, name: str, architecture: str) -> bytes:
    core = require_cuda()
    options = core.ProgramOptions(name=name, arch=architecture, std="c++17")
    program = core.Program(text, "c++", options)
    try:
        return bytes(program.compile("cubin").code)
    except Exception as error:  # nvrtc's class is private; its message holds the compiler's log
        raise KernelsUnavailable(f"NVRTC cannot compile {name} for {architecture}: {error}") from error
    finally:
        program.close()


def _read(kept: Path) -> bytes | None:
    try:
        stored = kept.read_bytes()
    except OSError:
        return None
    digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(kept: Path, code: bytes) -> None:
    """Appear under its name whole or not at all: ranks that start together race here."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=kept.parent, prefix=kept.name, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(draft, kept)
    except OSError as error:
        _log.warning("compiled kernels are not kept in %s: %s", kept.parent, error)
