# SPDX-License-Identifier: Apache-2.0
"""How a tool of the command line asks a server before its work: an answer, or the end of the tool with the reason."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from kvrail.frontend.refusing import refuse

__all__ = ["ask", "asker", "cache_page_tokens"]


def asker(headers: dict[str, str]) -> httpx.Client:
    """A client that asks the server itself, whatever proxy the environment names, and trusts whom the system trusts."""
    return httpx.Client(timeout=30, headers=headers, trust_env=False, verify=ssl.create_default_context())


def ask(tool: str, client: httpx.Client, url: str) -> dict[str, Any]:
    """The JSON object at `url`, or the end of the program `tool`."""
    try:
        response = client.get(url)
        if response.status_code != 200:
            refuse(tool, f"{url}: HTTP {response.status_code}: {response.text[:300]}")
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        refuse(tool, f"cannot ask {url}: {error}")
    return body


def cache_page_tokens(tool: str, url: str, headers: dict[str, str]) -> int:
    """Tokens in a page of the prefix caches of the CE or single engine at `url`, or the end of the program `tool`."""
    with asker(headers) as client:
        cache = ask(tool, client, f"{url}/cache")
    if cache.get("role") == "pe":
        refuse(tool, f"{url} is a prefill engine: give the URL of its completion engine")
    try:
        return int(cache["page_tokens"])
    except (KeyError, TypeError, ValueError):
        refuse(tool, f"{url}/cache names no page size")
