"""Gated DeltaNet-2: linear attention with channel-wise erase and write gates, exact for any decay."""

from gdn2.ops.rule import gated_delta_rule, gated_delta_step

__version__ = "0.1.0"
__all__ = ["gated_delta_rule", "gated_delta_step"]
