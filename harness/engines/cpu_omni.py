"""The CPU platform that `cpu_platform.plugin` names; imported by vLLM-Omni, never before it."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.platforms.interface import OmniPlatformEnum, UnspecifiedOmniPlatform


class CpuOmniPlatform(UnspecifiedOmniPlatform):
    """Plain torch on the CPU; attention by torch's scaled dot product."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False) -> str:
        return "loudfail.harness.engines.cpu_attention.CpuSDPABackend"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 0

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def synchronize(cls) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Loudfail's CPU platform for vLLM-Omni has no {name!r}")
