"""MiniMax H3's native checkpoint, for releases of vLLM-Omni whose model does not load Diffusers weights (0.28 and before).

Other names of the configuration and of the modules, Q, K and V of each head side by side in one tensor, [gate; value] in fc1, and a rotary table.
The model's own loader then brings that into its runtime layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Configuration of diffusers' transformer → the native name.
CONFIGURATION = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The transformer's configuration under the native names."""
    return {CONFIGURATION.get(name, name): value for name, value in config.items()}


def native_state(
    parameters: Sequence[str], state: Mapping[str, torch.Tensor], config: Mapping[str, Any], actor_names: Callable[[str], list[str]]
) -> dict[str, torch.Tensor]:
    """The actor's weights as a native checkpoint.

    Args:
        parameters: names of the engine's parameters.
        state: weights under diffusers' names.
        config: of the transformer, under diffusers' names.
        actor_names: engine module → the actor's modules for its slices.

    Raises:
        KeyError: the actor has no weight for a parameter of the engine.
    """
    result = {}
    for name in parameters:
        module, _, kind = name.rpartition(".")
        parts = [state[f"{actor.partition('#')[0]}.{kind}"] for actor in actor_names(module)]
        if module.endswith("attn.qkv_proj"):
            heads = [part.unflatten(0, (config["num_attention_heads"], -1)) for part in parts]
            result[name] = torch.cat(heads, dim=1).flatten(0, 1)
        elif module.endswith("mlp.fc1"):  # both slices come of one tensor
            value, gate = parts[0].chunk(2)
            result[name] = torch.cat([gate, value])
        else:
            (result[name],) = parts
    exponents = torch.arange(0, 2 * config["rope_freq_dim"], 2, dtype=torch.float32) / (2 * config["rope_freq_dim"])
    return result | {"rope.inv_freq": 1.0 / config.get("rope_theta", 10000.0) ** exponents}
