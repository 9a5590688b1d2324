# SPDX-License-Identifier: Apache-2.0
"""The engines: model, scheduler, rank process, control plane."""
