# SPDX-License-Identifier: Apache-2.0
"""What no tool can work with is refused at once: status 2, the reason in words, no traceback, nothing started."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

HERE = "http://127.0.0.1:9"
TWO = ("--ref", HERE, "--split", HERE)
SPLIT = ("--model", "m", "--pe-gpus", "cpu", "--ce-gpus", "cpu")
WRONG: list[tuple[str, tuple[str, ...], str]] = [
    ("frontend.transfer_bench", ("--pages", "0"), "--pages 0: 1 to 1048576"),
    ("frontend.transfer_bench", ("--page-bytes", "-4096"), "--page-bytes -4096"),
    ("frontend.transfer_bench", ("--rounds", "0"), "--rounds"),
    ("frontend.transfer_bench", ("--way", "pigeon"), "--way pigeon: one of"),
    ("frontend.transfer_bench", ("--memory", "disk->gpu"), "--memory disk->gpu: one of"),
    ("frontend.transfer_bench", ("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ("frontend.transfer_bench", ("--json", "/tmp"), "/tmp is a folder"),
    ("frontend.transfer_bench", ("--plot", "/no/such/folder/x.html"), "there is no folder /no/such/folder"),
    ("frontend.cli", ("doctor", "--json", "/no/such/folder/x"), "there is no folder /no/such/folder"),
    ("frontend.cli", ("doctor", "--rank", "0"), "--rendezvous and --rank are for --nccl"),
    ("frontend.cli", ("doctor", "--nccl", "--rank", "0"), "go together"),
    (
        "frontend.cli",
        ("launch", "--role", "single", "--model", "m", "--threads", "1000000"),
        "--threads must be",
    ),
    ("frontend.check_identity", (*TWO, "--max-tokens", "0"), "--max-tokens"),
    ("frontend.check_identity", (*TWO, "--prompts", "-1"), "--prompts"),
    ("frontend.check_identity", (*TWO, "--concurrency", "1,0"), "--concurrency 1,0"),
    ("frontend.check_identity", (*TWO, "--dtype", "int4"), "--dtype"),
    ("frontend.check_identity", (*TWO, "--expect-lane", "pigeon"), "--expect-lane pigeon"),
    ("frontend.check_storm", (*TWO, "--longest", "0"), "--longest"),
    (
        "frontend.check_storm",
        (*TWO, "--shortest", "64", "--longest", "16"),
        "--longest 16 is less than --shortest 64",
    ),
    ("frontend.check_storm", (*TWO, "--within", "-1"), "--within"),
    ("frontend.check_prefix_cache", ("--url", HERE, "--turns", "1"), "--turns"),
    ("frontend.check_prefix_cache", ("--url", HERE, "--words", "0"), "--words"),
    ("frontend.check_prefix_cache", ("--url", HERE, "--dtype", "int4"), "--dtype"),
    ("frontend.replay_conversations", ("--url", HERE, "--concurrency", "0"), "--concurrency"),
    ("frontend.replay_conversations", ("--url", HERE, "--svg", "/no/such/folder/x"), "there is no folder"),
    ("frontend.bench_serve", ("--url", HERE, "--json", "/no/such/folder/x"), "there is no folder"),
    ("frontend.bench_serve", ("--url", HERE, "--in", "0"), "--in 0"),
    ("frontend.bench_serve", ("--url", HERE, "--vocab", "9:3"), "--vocab 9:3"),
    ("frontend.bench_split", (*SPLIT, "--routing", "random"), "--routing random: affinity"),
    ("frontend.bench_split", (*SPLIT, "--host-cache-gb", "0,-1"), "--host-cache-gb 0,-1"),
    ("frontend.bench_split", (*SPLIT, "--kv-gb", "-1"), "--kv-gb"),
    ("frontend.bench_split", (*SPLIT, "--vocab", "9:3"), "--vocab 9:3"),
    ("frontend.bench_split", (*SPLIT, "--parts", "all"), "--parts all"),
    ("frontend.bench_split", (*SPLIT, "--json", "/no/such/folder/x"), "there is no folder"),
    ("frontend.bench_vllm", ("--in", "0"), "--in 0"),
    ("frontend.bench_vllm", ("--in", "2048"), "are more than --max-model-len 2048"),
    ("frontend.bench_vllm", ("--dtype", "int4"), "--dtype"),
    ("frontend.bench_frontend", ("--streams", "0"), "--streams must be between 1 and 10000"),
    ("frontend.bench_frontend", ("--rate", "nan"), "--rate must be between"),
    ("frontend.bench_frontend", ("--json", "/no/such/folder/x"), "there is no folder"),
    ("runtime.random_model", ("/tmp/never", "--shape", "huge"), "--shape huge: must be one of"),
    ("runtime.random_model", ("/tmp/never", "--shape", "tiny", "--dtype", "int4"), "--dtype"),
    (
        "runtime.random_model",
        ("/tmp/never", "--shape", "tiny", "--tokenizer", "/nope"),
        "--tokenizer /nope: no folder",
    ),
    ("runtime.bench_engine", ("--model", "/nope"), "--model /nope: no such file or folder"),
    ("runtime.bench_engine", ("--dtype", "int4"), "--dtype"),
    ("runtime.bench_engine", ("--threads", "0"), "--threads"),
    ("frontend.demo", ("--lane", "pigeon"), "--lane pigeon"),
]
MODULES = sorted({module for module, _, _ in WRONG})


# A module as a program, several times over: what takes the time is to load it.
_ALL = """
import contextlib, io, json, runpy, sys

module, *cases = json.loads(sys.argv[1])
found = []
for arguments in cases:
    sys.argv = [module, *arguments]
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(f"kvrail.{module}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    found.append([status, said.getvalue()])
print(json.dumps(found))
"""


@functools.cache
def answers(module: str) -> dict[tuple[str, ...], tuple[int, str]]:
    """Status and words for each of the module's cases, and for --help, by its arguments."""
    cases = [("--help",), *(arguments for name, arguments, _ in WRONG if name == module)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ALL, json.dumps([module, *cases])],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(cases, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize(
    ("module", "arguments", "said"), WRONG, ids=[f"{m} {' '.join(a[-2:])}" for m, a, _ in WRONG]
)
def test_what_cannot_work_is_refused(module: str, arguments: tuple[str, ...], said: str) -> None:
    status, text = answers(module)[arguments]
    # Boxes of rich wrap lines, and put bars at their ends.
    text = " ".join(text.replace("│", " ").split())
    assert status == 2, text
    assert said in text
    assert "Traceback" not in text


@pytest.mark.parametrize("module", MODULES)
def test_help_needs_nothing(module: str) -> None:
    status, text = answers(module)[("--help",)]
    assert status == 0
    assert "--" in text
