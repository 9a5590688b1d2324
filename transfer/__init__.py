# SPDX-License-Identifier: Apache-2.0
"""Pages over the wire: pools, links, tickets, one-sided pushes. Knows no model and no HTTP."""
