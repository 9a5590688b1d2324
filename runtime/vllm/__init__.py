# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine: the connector that moves its KV, and the server that splits its requests. Imported only here."""
