# SPDX-License-Identifier: Apache-2.0
"""HTTP over TLS, from the client to the completion engine and from there to the prefill engine."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from kit.cluster import Server, serving
from kit.tiny_checkpoint import tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

_FLAGS = ("--dtype", "float32", "--kv-pages", "64", "--page-tokens", "16", "--local-prefill", "never")


def _start(role: str, model: Path, folder: Path, files: dict[str, Path], *flags: str) -> Server:
    server = Server(
        role,
        model,
        folder,
        *_FLAGS[: 6 if role == "pe" else 8],
        "--ssl-certfile",
        str(files["cert"]),
        "--ssl-keyfile",
        str(files["key"]),
        *flags,
    )
    server.url = server.url.replace("http:", "https:").replace("127.0.0.1", "localhost")
    server.http = httpx.Client(
        base_url=server.url,
        timeout=10,
        trust_env=False,
        verify=ssl.create_default_context(cafile=str(files["ca"])),
    )
    return server


def test_the_split_over_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key", "other")}
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(files["ca"]))
    stranger.cert_pem.write_to_path(str(files["other"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(files["cert"]), append=True)
    model = tiny_checkpoint(tmp_path / "model", "llama")

    pe = _start("pe", model, tmp_path, files)
    ce = _start("ce", model, tmp_path, files, "--pe-url", pe.url, "--ssl-ca-certs", str(files["ca"]))
    wary = _start("ce", model, tmp_path, files, "--pe-url", pe.url, "--ssl-ca-certs", str(files["other"]))
    with serving(pe, ce, wary):
        pe.wait_ready()
        ce.wait_ready()
        answer = ce.http.post(
            "/v1/completions", json={"model": "model", "prompt": [5, 6, 7], "max_tokens": 4}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvrail-prefill"] == "remote"
        # A prefill engine whose certificate leads nowhere that we trust is not spoken to.
        assert wary.http.get("/health").status_code == 200
        assert wary.http.get("/ready").status_code == 503
        refused = wary.http.post("/v1/completions", json={"model": "model", "prompt": [5], "max_tokens": 1})
        assert refused.status_code == 503
        assert "certificate" in wary.log.read_text().lower()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{ce.url}/health", trust_env=False)
