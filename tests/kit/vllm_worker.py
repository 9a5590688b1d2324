# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker without vLLM: real memory, links and ledgers in a process of its own, steps told by JSON lines.

What kit.vllm_pair starts. argv[1]: role, blocks, groups, tensors, settings. `step` is one step of vLLM's loop: facts
in, then its forward pass (which writes the blocks that are to be computed), then what the worker reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvrail.runtime.vllm.kv_tensors import TensorView, geometry_of
from kvrail.runtime.vllm.meta import Call, Chunk, Finished, Load, StepFacts
from kvrail.runtime.vllm.service import Memory, Service
from kvrail.runtime.vllm.settings import Settings
from kvrail.runtime.vllm.worker_side import WorkerSide
from kvrail.transfer.layout import BlockLayout

BLOCK_TOKENS = 16
SHAPE = (2, BLOCK_TOKENS, 8)


class Worker:
    def __init__(self, config: dict[str, Any]) -> None:
        blocks, tensors = config["blocks"], config["tensors"]
        self.memory = np.zeros((tensors, blocks, *SHAPE), dtype=np.float32)
        views = [
            TensorView(
                f"layer.{group}.{at}",
                self.memory.ctypes.data,
                part.ctypes.data,
                part.shape,
                part.strides,
                part.itemsize,
            )
            for at, part in enumerate(self.memory)
            for group in range(config["groups"])
        ]
        groups = [[f"layer.{group}.{at}" for at in range(tensors)] for group in range(config["groups"])]
        geometry = geometry_of(views, blocks)
        layout = BlockLayout(
            page_tokens=BLOCK_TOKENS,
            groups=config["groups"],
            unit_bytes=geometry.unit_bytes,
            ranges=tuple(part.tensors for part in geometry.ranges),
            order=geometry.order,
            facts={"model": "m", **config["facts"]},
        )
        self.service = Service(
            Settings.of(config["role"], config["extra"]),
            Memory(layout, geometry, groups, self.memory),
            token=config["token"].encode(),
            rank=0,
            offset=0,
            ucx_overrides={},
        )
        self.side = WorkerSide()
        self.side.start(self.service)

    def begin(self, told: dict[str, Any]) -> None:
        facts = StepFacts(
            calls=[Call(one[0], bytes.fromhex(one[1]), one[2]) for one in told.get("calls", ())],
            chunks=[Chunk(*one) for one in told.get("chunks", ())],
            finished=[
                Finished(*one[:4], Call(one[4][0], bytes.fromhex(one[4][1]), one[4][2]) if one[4] else None)
                for one in told.get("finished", ())
            ],
            preempted=told.get("preempted", []),
            loads=[
                Load(
                    one["request"],
                    bytes.fromhex(one["ticket"]),
                    tuple(one["peer"]),
                    *one["rest"],
                    **one["more"],
                )
                for one in told.get("loads", ())
            ],
            cancelled=told.get("cancelled", []),
            idle=not told,
        )
        self.side.before_forward(facts)

    def layer(self, group: int, tensor: int, values: list[tuple[int, float]]) -> None:
        """One layer of the step's forward pass."""
        for block, value in values:
            self.memory[tensor, block] = tensor * 1000 + value
        self.side.after_layer(f"layer.{group}.{tensor}")

    def step(self, told: dict[str, Any]) -> dict[str, Any]:
        self.begin(told)
        self.compute(told.get("compute", ()))
        return self.end()

    def compute(self, values: Iterable[tuple[int, float]]) -> None:
        for block, value in values:
            self.memory[:, block] = np.arange(self.memory.shape[0]).reshape(-1, 1, 1, 1) * 1000 + value

    def end(self) -> dict[str, Any]:
        self.side.after_forward(None)
        outcome = self.side.outcome()
        news = self.side.take_news()
        return {
            "sent": sorted(outcome.sent),
            "received": sorted(outcome.received),
            "failed": sorted(outcome.failed),
            "tokens": news.tokens,
            "held": news.held,
            "quiet": sorted(news.quiet),
        }

    def do(self, command: dict[str, Any]) -> object:
        match command["do"]:
            case "step":
                return self.step(command["facts"])
            case "begin":
                return self.begin(command["facts"])
            case "layer":
                return self.layer(command["group"], command["tensor"], command["values"])
            case "compute":
                return self.compute(command["values"])
            case "end":
                return self.end()
            case "tensors":
                return [float(part.flat[0]) for part in self.memory[:, command["block"]]]
            case "look":
                return [self._value(block) for block in command["blocks"]]
            case "gauges":
                return self.service.gauges()
            case "counters":
                return self.service.counters()
            case "close":
                self.side.close()
                return None
            case other:
                raise AssertionError(other)

    def _value(self, block: int) -> float | None:
        """What was computed into this block; None when its bytes are not of one value."""
        value = self.memory[0, block].flat[0]
        expected = np.arange(self.memory.shape[0]).reshape(-1, 1, 1, 1) * 1000 + value
        return (
            float(value)
            if (self.memory[:, block] == expected).all() or not self.memory[:, block].any()
            else None
        )


def main() -> None:
    worker = Worker(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: dict[str, object] = {"value": worker.do(command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
        if command["do"] == "close":
            return


if __name__ == "__main__":
    main()
