# SPDX-License-Identifier: Apache-2.0
"""`runtime convert`: a GGUF model as a safetensors folder, so that later starts take seconds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvrail.runtime.checkpoint import convert_gguf, resolve_model

__all__ = ["convert_model"]


def convert_model(model: str, out: str | None) -> int:
    """Convert `model` into the folder `out`, or into the cache; prints the folder. Returns the exit status."""
    say = Console(stderr=True)
    with say.status(f"converting {model}") as status:

        def progress(what: str, share: float) -> None:
            status.update(f"{what}: {share:.0%}")

        path = Path(model)
        if out is not None and path.suffix == ".gguf":
            convert_gguf(path, Path(out), progress)
            folder = Path(out)
        else:
            folder = resolve_model(model, progress)
    print(folder)
    return 0
