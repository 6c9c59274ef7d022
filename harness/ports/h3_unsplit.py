"""H3 with its feed-forward adapter handed over as adapters are published: one pair for ``ff.net.0.proj``, not one for each half of the fused layer.

What becomes of it depends on the release of vLLM-Omni and on the tensor-parallel degree; `loudfail gate loudfail.harness.ports.h3_unsplit:H3Unsplit`
says what. See docs/upgrades/silent-adapter.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loudfail.harness.engines.vllm_omni import LoRAParts
from loudfail.harness.port import AdapterConfig
from loudfail.harness.ports.h3 import H3, H3Fused


class UnsplitFused(H3Fused):
    """`H3Fused` that leaves fc1's adapter whole, rows in the engine's order [gate; value], and names no slices of fc1, as the model itself does."""

    def packed_modules(self) -> dict[str, list[str]]:
        return {"qkv_proj": ["to_q", "to_k", "to_v"]}

    def hand_over(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, degree: int) -> dict[str, LoRAParts]:
        split = super().hand_over(state, config, degree)
        whole: dict[str, LoRAParts] = {}
        for name, parts in split.items():
            if name.endswith(".fc1_0"):
                gate, value = parts, split[f"{name[:-1]}1"]
                whole[name.removesuffix("_0")] = LoRAParts(gate.a, [torch.cat([gate.b[0], value.b[0]])])
            elif not name.endswith(".fc1_1"):
                whole[name] = parts
        return whole


class H3Unsplit(H3):
    """See the module."""

    def fused(self, config: dict[str, Any]) -> H3Fused:
        return UnsplitFused(**vars(super().fused(config)))
