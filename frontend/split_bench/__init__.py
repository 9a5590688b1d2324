# SPDX-License-Identifier: Apache-2.0
"""A split against single engines on the same devices: what scripts/bench_split starts, asks and writes."""
