"""LTX-2 in vLLM-Omni as it is released: the norms of q and k over all heads drop the sum that the ranks share.

``loudfail gate loudfail.harness.ports.ltx2_released:LTX2Released`` says what becomes of it at which tensor-parallel degree. See
docs/upgrades/silent-norm.md.
"""

from __future__ import annotations

from typing import Any

import torch

from loudfail.harness.ports.ltx2 import LTX2
from loudfail.harness.ports.ltx2_rollout import LTX2Fused


class ReleasedFused(LTX2Fused):
    """`LTX2Fused` without `share_sums`."""

    def build(self, dtype: torch.dtype) -> Any:
        model = super().build(dtype)
        for module in model.modules():
            vars(module).pop("_all_reduce", None)
        return model


class LTX2Released(LTX2):
    """See the module."""

    def fused(self, config: dict[str, Any]) -> LTX2Fused:
        return ReleasedFused(**vars(super().fused(config)))
