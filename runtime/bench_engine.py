# SPDX-License-Identifier: Apache-2.0
"""How fast the embedded engine is by itself: decoding alone and together, and reading a prompt, on this machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from kvrail.runtime.checkpoint import cache_dir, open_checkpoint
from kvrail.runtime.config import Attention
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.messages import Sampling
from kvrail.runtime.model import PagedModel
from kvrail.runtime.output_file import writable
from kvrail.transfer.pages import PagePool

__all__ = ["main", "measure"]

_PAGE_TOKENS = 128
# Tokens of a chunk on a GPU: enough for its matrix products to be as quick as they get.
_GPU_BUDGET = 8192


def measure(
    model: PagedModel, *, batch: int, prompt: int, tokens: int, budget: int | None = None
) -> dict[str, Any]:
    """Prefill `batch` prompts of `prompt` tokens, then decode `tokens` tokens of each together; times of every step.

    `budget`: tokens of a prefill chunk (default: all prompts in one step). Record: what, batch, prompt, tokens_per_s
    (decode: of the median step; prefill: of all its steps), best_tokens_per_s, cpu_tokens_per_s (by CPU time: with one
    thread, what it would be without other load), step_ms (median), steps.
    """
    budget = budget or max(2048, batch * prompt)
    # Who is prefilled first decodes beside the others' prefills, and must last until all decode together.
    length = tokens + 1 + -(-batch * prompt // budget)
    # One to spare for each: the engine admits nobody into pages that running ones may want.
    pages = batch * (model.layout.pages_for(prompt + length) + 1)
    slots = batch if model.layout.state_bytes else 0
    engine = EmbeddedEngine(
        model,
        PagePool(pages, slots),
        _memory(model, pages * model.layout.page_bytes),
        state_memory=_memory(model, slots * model.layout.state_bytes) if slots else None,
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        prefix_cache=False,
    )
    random = np.random.default_rng(0)
    sampling = Sampling(max_tokens=length if tokens else 1, seed=0)
    for n in range(batch):
        engine.add(str(n), random.integers(0, model.vocab_size, prompt).astype(np.uint32), sampling)
    reading: list[tuple[float, float]] = []
    decoding: list[tuple[float, float]] = []
    while engine.has_work and len(decoding) < max(tokens, 1):
        together = engine.load == {"running": batch, "waiting": 0, "waiting_tokens": 0} and bool(reading)
        started, worked = time.perf_counter(), time.process_time()
        engine.step()
        spent = (time.perf_counter() - started, time.process_time() - worked)
        (decoding if together else reading).append(spent)
    for n in range(batch):
        engine.abort(str(n))
    engine.close()
    if tokens:
        steps, count = decoding, batch
    else:
        steps, count = [(sum(wall for wall, _ in reading), sum(cpu for _, cpu in reading))], batch * prompt
    median = statistics.median(wall for wall, _ in steps)
    return {
        "what": "decode" if tokens else "prefill",
        "batch": batch,
        "prompt": prompt,
        "tokens_per_s": round(count / median, 1),
        "best_tokens_per_s": round(count / min(wall for wall, _ in steps), 1),
        "cpu_tokens_per_s": round(count / statistics.median(cpu for _, cpu in steps), 1),
        "step_ms": round(1000 * median, 2),
        "steps": len(decoding if tokens else reading),
    }


def _memory(model: PagedModel, size: int) -> Any:
    """`size` bytes for pages or state, on the model's device."""
    if model.device.type == "cpu":
        return bytearray(size)
    return torch.empty(size, dtype=torch.uint8, device=model.device)


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


def _records(model: PagedModel, rounds: int) -> Iterator[dict[str, Any]]:
    """What is measured on this kind of device."""
    if model.device.type == "cpu":
        yield _best(model, rounds, batch=1, prompt=128, tokens=32)
        yield _best(model, rounds, batch=8, prompt=128, tokens=32)
        yield _best(model, rounds, batch=1, prompt=512, tokens=0)
        return
    for batch in (1, 8, 64, 256):
        yield _best(model, rounds, batch=batch, prompt=128, tokens=32, budget=_GPU_BUDGET)
    for prompt in (128, 512, 4096, 32768):
        yield _best(model, rounds, batch=1, prompt=prompt, tokens=0, budget=_GPU_BUDGET)
    yield _best(model, 1, batch=64, prompt=4096, tokens=32, budget=_GPU_BUDGET)


def main(
    model: Annotated[str, typer.Option(help="model folder, GGUF file or hub name")] = "",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="number type of weights and pages")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    attention: Annotated[Attention, typer.Option(help="auto, flashinfer or torch")] = "auto",
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="replay decoding and short steps as CUDA graphs"),
    ] = True,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="threads of arithmetic")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="the quickest of this many rounds counts")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write the records to this file")
    ] = None,
) -> None:
    """Decode and prefill speed: on a CPU at batch 1 and 8, on a GPU up to batch 256 and 32,768 tokens."""
    torch.set_num_threads(threads)
    folder = model or str(cache_dir() / "models" / "SmolLM2-135M-Instruct")
    began = time.perf_counter()
    try:
        loaded = PagedModel.load(
            open_checkpoint(folder),
            dtype,
            _PAGE_TOKENS,
            device=device,
            attention=attention,
            cuda_graphs=cuda_graphs,
        )
    except ConfigError as error:
        typer.echo(f"bench_engine: {error}", err=True)
        raise typer.Exit(2) from error
    facts = machine_facts(loaded.arithmetic) | {"load_s": round(time.perf_counter() - began, 1)}
    say = Console()
    say.print(", ".join(f"{name}: {value}" for name, value in facts.items()), highlight=False)
    records = list(_records(loaded, rounds))
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
