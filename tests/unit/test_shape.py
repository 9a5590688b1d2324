# SPDX-License-Identifier: Apache-2.0
"""The shape of the repository: layers point one way, files stay small, one file reads the environment."""

from __future__ import annotations

import ast
import functools
import importlib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["kernels", "transfer", "runtime", "frontend"]
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
NATIVE = sorted(
    path for layer in LAYERS for end in ("*.cpp", "*.h", "*.cu") for path in (ROOT / layer).rglob(end)
)
# About 300 lines is the aim; the two ticket ledgers, one state machine each, are the longest. Beyond this a file holds
# more than one idea.
CEILING = 450


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("kvrail", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@functools.cache
def _reaches_vllm(module: str) -> bool:
    """Whether importing one of our modules imports vLLM."""
    path = next((path for path in FILES if _name(path) == module), None)
    names = _top_imports(path) if path is not None else set()
    return any(name.split(".")[0] == "vllm" or _reaches_vllm(name) for name in names)


def _top_imports(path: Path) -> set[str]:
    """What is imported as soon as the file is."""
    body = _tree(path).body
    found = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", FILES + NATIVE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= CEILING


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_left(path: Path) -> None:
    own = LAYERS.index(path.relative_to(ROOT).parts[0])
    for name in _imports(path):
        assert name.split(".")[0] not in LAYERS, f"{name}: import kvrail.{name}"
        if name.startswith("kvrail."):
            assert LAYERS.index(name.split(".")[1]) <= own, (
                f"{path.name} imports {name} from a layer above it"
            )


def test_no_import_cycles() -> None:
    names = {_name(path) for path in FILES}
    graph = {_name(path): {name for name in _imports(path) if name in names} for path in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_config_reads_the_environment(path: Path) -> None:
    if path != ROOT / "runtime" / "config.py":
        names = {n.attr for n in ast.walk(_tree(path)) if isinstance(n, ast.Attribute)}
        assert not names & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_vllm_is_imported_in_one_place(path: Path) -> None:
    if path.parent != ROOT / "runtime" / "vllm":
        assert not any(name.split(".")[0] == "vllm" for name in _imports(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(_tree(path)), "the first line of the docstring states the one idea"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_exist(path: Path) -> None:
    if path.name == "__main__.py":
        return
    with warnings.catch_warnings():
        if _reaches_vllm(_name(path)):
            warnings.simplefilter("ignore")  # Those of torch, with which vLLM compiles as it is imported.
            pytest.importorskip(
                "vllm.sampling_params",
                reason="vLLM is an optional extra; scripts/test_vllm runs this with it",
            )
        module = importlib.import_module(_name(path))
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which is not there"
