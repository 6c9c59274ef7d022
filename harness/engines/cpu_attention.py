"""vLLM-Omni's SDPA attention backend on a platform that its dispatch does not know: the same code as on CUDA, which is plain torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """`SDPAImpl` whose dispatch always takes its torch-only branch."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None) -> torch.Tensor:
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSDPAImpl


# Before 0.30 the attention layer runs float32 on an `SDPAImpl` of its own, whatever backend the platform names.
SDPAImpl.forward = CpuSDPAImpl.forward
