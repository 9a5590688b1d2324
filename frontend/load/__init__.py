# SPDX-License-Identifier: Apache-2.0
"""Load for any OpenAI server: requests, when they arrive, and what their answers looked like over time."""
