"""The heavy imports of the rollout, done once in the server that ranks are forked from. Quiet; where an import fails, the ranks report it."""

import atexit
import contextlib
import gc
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Whether to use FP8 kernels that no model here has is otherwise asked of the GPU at import, and a process that has touched the GPU cannot fork ranks.
os.environ.setdefault("VLLM_OMNI_USE_QUACK_FP8", "0")
logging.disable(logging.WARNING)

# Registered before all others, so run last: without the interpreter's teardown Triton's binding library does not list what is still alive, sixty
# lines below the verdict. Ranks do not come here, they end as forked processes do.
atexit.register(os._exit, 0)

with contextlib.suppress(ImportError):
    import torch
    import vllm
    import vllm.distributed
    import vllm.lora.lora_model  # noqa: F401
    import vllm_omni.diffusion.lora.manager

    import loudfail.harness.engines.vllm_omni  # noqa: F401

    if not torch.backends.cuda.is_built():  # with a GPU it asks the GPU for its abilities, and no rank could be forked after that
        import vllm_omni.diffusion.distributed.hsdp  # noqa: F401  and with it PEFT and Diffusers, a second of each rank

# What was imported is never garbage: collections in the ranks need not look at it, nor copy its pages.
gc.collect()
gc.freeze()
