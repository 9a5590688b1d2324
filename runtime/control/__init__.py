# SPDX-License-Identifier: Apache-2.0
"""The control plane: which engines are alive, and which of them takes a request."""
