# SPDX-License-Identifier: Apache-2.0
"""How fast the embedded engine is by itself: decoding alone and together, and reading a prompt, on this machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from kvrail.runtime.checkpoint import cache_dir, open_checkpoint
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.messages import Sampling
from kvrail.runtime.model import PagedModel
from kvrail.transfer.pages import PagePool

__all__ = ["main", "measure"]

_PAGE_TOKENS = 128


def measure(model: PagedModel, *, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Prefill `batch` prompts of `prompt` tokens, then decode `tokens` tokens of each; times of every step.

    Record: what, batch, prompt, tokens_per_s (median step), best_tokens_per_s, cpu_tokens_per_s (by the CPU time of
    the median step: with one thread, what it would be without other load), step_ms (median), steps.
    """
    pages = batch * model.layout.pages_for(prompt + tokens + 1)
    slots = batch if model.layout.state_bytes else 0
    engine = EmbeddedEngine(
        model,
        PagePool(pages, slots),
        bytearray(pages * model.layout.page_bytes),
        state_memory=bytearray(slots * model.layout.state_bytes) if slots else None,
        max_num_batched_tokens=max(2048, batch * prompt),
        prefix_cache=False,
    )
    random = np.random.default_rng(0)
    sampling = Sampling(max_tokens=tokens + 1, seed=0)
    for n in range(batch):
        engine.add(str(n), random.integers(0, model.vocab_size, prompt).astype(np.uint32), sampling)
    times: list[tuple[float, float]] = []
    while engine.has_work:
        started, worked = time.perf_counter(), time.process_time()
        engine.step()
        times.append((time.perf_counter() - started, time.process_time() - worked))
    # The first step reads the prompts and samples token 1.
    steps, count = (times[1:], batch) if tokens else (times[:1], batch * prompt)
    median = statistics.median(wall for wall, _ in steps)
    return {
        "what": "decode" if tokens else "prefill",
        "batch": batch,
        "prompt": prompt,
        "tokens_per_s": round(count / median, 1),
        "best_tokens_per_s": round(count / min(wall for wall, _ in steps), 1),
        "cpu_tokens_per_s": round(count / statistics.median(cpu for _, cpu in steps), 1),
        "step_ms": round(1000 * median, 2),
        "steps": len(steps),
    }


def machine_facts(arithmetic: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    capabilities = torch.cpu.get_capabilities()
    wanted = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": str(capabilities.get("cpu_name", platform.processor())),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": [name for name in wanted if capabilities.get(name)],
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "arithmetic": arithmetic,
    }


def _best(model: PagedModel, rounds: int, **what: int) -> dict[str, Any]:
    """The quickest of a few rounds: other load on the machine only ever slows one down."""
    return max((measure(model, **what) for _ in range(rounds)), key=lambda one: float(one["tokens_per_s"]))


def main(
    model: Annotated[str, typer.Option(help="model folder, GGUF file or hub name")] = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="threads of arithmetic")] = 1,
    rounds: Annotated[int, typer.Option(help="the quickest of this many rounds counts")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write the records to this file")
    ] = None,
) -> None:
    """Decode at batch 1 and 8 behind 128 tokens, prefill 512 tokens."""
    torch.set_num_threads(threads)
    folder = model or str(cache_dir() / "models" / "SmolLM2-135M-Instruct")
    loaded = PagedModel.load(open_checkpoint(folder), dtype, _PAGE_TOKENS)
    facts = machine_facts(loaded.arithmetic)
    say = Console()
    say.print(", ".join(f"{name}: {value}" for name, value in facts.items()), highlight=False)
    records = [
        _best(loaded, rounds, batch=1, prompt=128, tokens=32),
        _best(loaded, rounds, batch=8, prompt=128, tokens=32),
        _best(loaded, rounds, batch=1, prompt=512, tokens=0),
    ]
    table = Table("", "batch", "prompt", "tokens/s", "best step", "by CPU time", "ms a step")
    for one in records:
        table.add_row(
            one["what"],
            str(one["batch"]),
            str(one["prompt"]),
            f"{one['tokens_per_s']:.1f}",
            f"{one['best_tokens_per_s']:.1f}",
            f"{one['cpu_tokens_per_s']:.1f}",
            f"{one['step_ms']:.1f}",
        )
    say.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
