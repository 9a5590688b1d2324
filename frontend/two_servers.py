# SPDX-License-Identifier: Apache-2.0
"""What a check compares: two servers, both there, of one model, and not one and the same; over which lane."""

from __future__ import annotations

from typing import Any

import httpx

from kvrail.frontend.asking import ask
from kvrail.frontend.refusing import refuse
from kvrail.runtime.config_checks import LANES, is_lane

__all__ = ["refuse_no_lane", "split_card"]


def refuse_no_lane(tool: str, label: str | None) -> None:
    """End the program `tool` for an --expect-lane that no lane is called: no page could come over it."""
    if label is not None and not is_lane(label):
        refuse(tool, f"--expect-lane {label}: must be {LANES}")


def split_card(tool: str, client: httpx.Client, ref: str, split: str) -> dict[str, Any]:
    """The model card of the split. Ends the program `tool` when the two cannot be compared."""
    card = _card(tool, client, split)
    theirs = _card(tool, client, ref)
    if theirs["id"] != card["id"]:
        refuse(tool, f"the two servers name different models: ref {theirs['id']}, split {card['id']}")
    # Whatever the names and addresses under which it is reached.
    same = ask(tool, client, f"{split}/health").get("instance")
    if same is not None and same == _instance(client, ref):
        refuse(
            tool,
            f"--ref {ref} and --split {split} are one server: its answers would be compared with themselves; start a "
            "single engine (runtime launch --role single) for --ref",
        )
    if card["max_model_len"] is None:
        refuse(tool, f"{split} is still loading its model")
    return card


def _card(tool: str, client: httpx.Client, url: str) -> dict[str, Any]:
    try:
        card: dict[str, Any] = ask(tool, client, f"{url}/v1/models")["data"][0]
    except (KeyError, IndexError, TypeError):
        refuse(tool, f"{url}/v1/models names no model")
    return card


def _instance(client: httpx.Client, ref: str) -> object:
    """That of the reference, which may be any server with the routes of OpenAI."""
    try:
        return client.get(f"{ref}/health").json().get("instance")
    except (httpx.HTTPError, ValueError, AttributeError):
        return None
