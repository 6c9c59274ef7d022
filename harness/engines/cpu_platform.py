"""vLLM-Omni on a CPU: an out-of-tree platform, found through the entry-point group ``vllm_omni.platform_plugins``.

vLLM-Omni 0.30 ships platforms for CUDA, ROCm, NPU, XPU and MUSA. Its layers fall back to plain torch everywhere else, except that the attention
dispatch needs a platform that names a backend. This plugin names one and steps aside where one of the built-in platforms is active.
"""

from __future__ import annotations


def plugin() -> str | None:
    """The platform's qualified name, or None where a built-in platform claims this machine."""
    from vllm_omni.platforms import builtin_omni_platform_plugins

    if any(detect() is not None for detect in builtin_omni_platform_plugins.values()):
        return None
    return "loudfail.harness.engines.cpu_omni.CpuOmniPlatform"
