# SPDX-License-Identifier: Apache-2.0
"""Compiling device code at run time: what is said without CUDA, and the folder of compiled code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrail.kernels import compiled
from kvrail.kernels.page_copy import PageCopier, PageKernels, PageList, Stride

SOURCE = Path(compiled.__file__).parent / "csrc" / "page_copy.cu"


def test_without_cuda_core_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(compiled.KernelsUnavailable, match=r"install kvrail\[cuda13\]"):
        PageKernels.load(0, None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A source that compiles at once; skips where NVRTC is missing."""
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    source = tmp_path / "small.cu"
    source.write_text('extern "C" __global__ void small(unsigned* x) { *x = 1; }')
    try:
        compiled.cubin(source, "sm_90", None)
    except compiled.KernelsUnavailable as error:
        if "need NVRTC" in str(error):
            pytest.skip(str(error))
        raise
    return source


@pytest.mark.usefixtures("small")
def test_nvrtc_compiles_the_page_copy_kernels() -> None:
    assert compiled.cubin(SOURCE, "sm_90", None).startswith(b"\x7fELF")


def test_compiled_code_is_kept_and_survives_damage(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "new" / "folder"
    code = compiled.cubin(small, "sm_90", cache)
    (kept,) = cache.iterdir()
    assert code.startswith(b"\x7fELF")

    kept.write_bytes(kept.read_bytes()[:-100])
    assert compiled.cubin(small, "sm_90", cache) == code
    assert len(list(cache.iterdir())) == 1, "a draft was left behind"

    def refuse(*_: object) -> bytes:
        raise AssertionError("compiled although the code is kept")

    monkeypatch.setattr(compiled, "_compile", refuse)
    assert compiled.cubin(small, "sm_90", cache) == code
    with pytest.raises(AssertionError, match="compiled although"):
        compiled.cubin(small, "sm_80", cache)


@pytest.mark.usefixtures("small")
def test_a_mistake_in_the_source_shows_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void f() { undeclared = 1; }")
    with pytest.raises(compiled.KernelsUnavailable, match=r"(?s)wrong\.cu for sm_90.*undeclared"):
        compiled.cubin(source, "sm_90", None)


def test_a_folder_that_cannot_be_written_costs_a_warning(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compiled.cubin(small, "sm_90", blocked / "cache").startswith(b"\x7fELF")
    assert "not kept" in caplog.text


class Unlaunchable(PageCopier):
    """Arguments are checked before anything is launched, so their checks need no GPU."""

    def __init__(self) -> None:
        self._kernels = None

    def _launch(self, *_: object) -> None:
        raise AssertionError("launched")


@pytest.mark.parametrize(
    ("pages", "unit_bytes", "segments", "message"),
    [
        (PageList(0, 0, 1, 8, Stride(64)), 40, 1, "unit of 40 bytes"),
        (PageList(8, 0, 1, 8, Stride(64)), 64, 1, "pool at 0x8"),
        (PageList(0, 0, 1, 8, Stride(72)), 64, 1, "page=72"),
        (PageList(0, 0, 1, 8, Stride(64, offset=4)), 64, 1, "offset=4"),
        (PageList(0, 0, 1, 8, Stride(64, segment=8)), 16, 2, "segment=8"),
        (PageList(0, 4, 1, 8, Stride(64)), 64, 1, "not aligned to 8"),
        (PageList(0, 0, 1, 8, Stride(64)), 0, 1, "nothing to copy"),
        (PageList(0, 0, 2**20, 8, Stride(64)), 2**24, 1, "split the list"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(
    pages: PageList, unit_bytes: int, segments: int, message: str
) -> None:
    good = PageList(0, 0, pages.entries, 8, Stride(2**24))
    with pytest.raises(ValueError, match=message):
        Unlaunchable().copy(pages, good, unit_bytes=unit_bytes, segments=segments)
    with pytest.raises(ValueError, match=message):
        Unlaunchable().copy(good, pages, unit_bytes=unit_bytes, segments=segments)
    with pytest.raises(ValueError, match=message):
        Unlaunchable().sum(pages, unit_bytes=unit_bytes, segments=segments, sums=16)


def test_lists_of_different_length_are_refused() -> None:
    pages = PageList(0, 0, 4, 8, Stride(64))
    for other in (pages._replace(entries=5), pages._replace(index_bytes=4)):
        with pytest.raises(ValueError, match="page lists differ"):
            Unlaunchable().copy(pages, other, unit_bytes=64)
