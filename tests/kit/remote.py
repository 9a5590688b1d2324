# SPDX-License-Identifier: Apache-2.0
"""Another process that is told what to do by JSON lines: the test's end, and the loop of the other end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Remote:
    """Runs `script`, which calls `serve`. Every method of its server can be called here."""

    def __init__(self, script: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def begin(self, command: str, **arguments: Any) -> None:
        """Give a command; result() waits for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other process ended with status {self.process.wait(10)}"
        return json.loads(line)

    def do(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.result()

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL: also reaped, a zombie counts as alive to those who look for its process id."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def serve(server: Any) -> None:
    """Answer the commands of a Remote until it is gone."""
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(getattr(server, command)(**arguments)), flush=True)
