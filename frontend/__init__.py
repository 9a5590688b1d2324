# SPDX-License-Identifier: Apache-2.0
"""HTTP for people: the OpenAI routes, rendering, streaming, the command line."""
