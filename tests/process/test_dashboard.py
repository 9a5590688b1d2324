# SPDX-License-Identifier: Apache-2.0
"""Every metric that the Grafana dashboard names is exposed by a running split, with the labels that it sums by."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.split import ask

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

DASHBOARD = Path(__file__).resolve().parents[2] / "doc" / "grafana.json"
NAME = re.compile(r"\b(?:kvrail_|vllm:)\w+")


def test_every_metric_of_the_dashboard_exists(cluster: Cluster) -> None:
    split = cluster.split("shm")
    assert (
        ask(split.ce.url, prompt="In the beginning there was", max_tokens=4).headers["x-kvrail-prefill"]
        == "remote"
    )
    exposed = {server.role: server.http.get("/metrics").text for server in (split.ce, split.pe)}
    names = {
        match
        for text in exposed.values()
        for match in re.findall(r"^([a-zA-Z0-9_:]+)[{ ]", text, re.MULTILINE)
    }
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(asked) > 25
    assert asked <= names, sorted(asked - names)
    # What is summed by a label has that label (an engine's own labels come from the scraping).
    for expression in expressions:
        for labels, name in re.findall(
            r"sum by \(([\w, ]+)\) \((?:rate\()?((?:kvrail_|vllm:)\w+)", expression
        ):
            for label in set(labels.split(", ")) - {"instance"}:
                assert re.search(rf'^{name}{{[^}}]*\b{label}="', exposed["ce"], re.MULTILINE), (name, label)
    assert re.search(r"^kvrail_handover_seconds_count [1-9]", exposed["ce"], re.MULTILINE)
    assert re.search(
        r'^vllm:time_to_first_token_seconds_count{model_name="tiny"} [1-9]', exposed["ce"], re.MULTILINE
    )
    assert re.search(r'^kvrail_link_probed_gb_per_s{.*lane="shm".*} ', exposed["ce"], re.MULTILINE)
