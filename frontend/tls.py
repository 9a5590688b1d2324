# SPDX-License-Identifier: Apache-2.0
"""TLS of the HTTP side: what we show to callers, and what a prefill engine's certificate must lead to."""

from __future__ import annotations

import ssl

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError

__all__ = ["check_certificate", "client_trust"]


def check_certificate(config: LaunchConfig) -> None:
    """Raise ConfigError when what HTTP is to be served with is of no use; said now, and not when a model is loaded."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        # A key with a passphrase would be asked for on the terminal: a server must not wait there.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=_no_passphrase
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile}: {error}"
        ) from None


def client_trust(config: LaunchConfig) -> ssl.SSLContext:
    """What calls to prefill engines trust. Host names are always checked. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}") from None


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase: give one without")
