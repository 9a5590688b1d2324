# SPDX-License-Identifier: Apache-2.0
"""For tests with a real vLLM: the model that they load, and what makes vLLM small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Inherited by every server. Without the first, the first request for log-probabilities compiles for half a minute.
_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session", autouse=True)
def _small() -> None:
    os.environ.update(_ENVIRONMENT)


@pytest.fixture(scope="session")
def vllm_model() -> Path:
    """A small instruct model, named by KVRAIL_TEST_MODEL."""
    folder = os.environ.get("KVRAIL_TEST_MODEL", "")
    if not folder:
        pytest.skip("KVRAIL_TEST_MODEL names no model folder (scripts/test_vllm fetches one)")
    return Path(folder)
