# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine on both sides: a KV connector that pushes pages while vLLM prefills. Told in doc/vllm.md."""
