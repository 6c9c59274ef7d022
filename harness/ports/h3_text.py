"""MiniMax H3's prompt path: a Qwen2 byte-level tokenizer and a Qwen3-VL conditioner read after its 50th decoder layer.

Without a checkpoint the tokenizer is the real class with the byte alphabet as vocabulary (every string has a unique id sequence), and the
encoder is the real class with 51 layers of 32 channels and seeded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LAYER = 50
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: A few merges, so that decoding and tokenizing again is not the identity on ids, as with the released vocabulary.
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("r", "a"), ("ra", "in"), ("Ġ", "a"), ("Ġ", "the"), ("b", "e"), ("l", "l"), ("be", "ll"))


def tokenizer(weights: str | None) -> Any:
    """The tokenizer of a checkpoint folder, or the tiny one."""
    from transformers import Qwen2TokenizerFast

    if weights is not None:
        return Qwen2TokenizerFast.from_pretrained(Path(weights) / "tokenizer", local_files_only=True)
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tiny = Qwen2TokenizerFast(vocab={word: index for index, word in enumerate(words)}, merges=list(MERGES), unk_token=None)
    tiny.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    return tiny


def encoder(weights: str | None, width: int) -> Any:
    """The conditioner of a checkpoint folder, or the tiny one with embeddings of ``width``."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    if weights is not None:
        return Qwen3VLForConditionalGeneration.from_pretrained(Path(weights) / "text_encoder", local_files_only=True).eval()
    tiny = tokenizer(None)
    ids = {name: tiny.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    head_dim = 8
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tiny), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=LAYER + 1, num_attention_heads=4, num_key_value_heads=2,
            head_dim=head_dim, max_position_embeddings=512, rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        ),
        vision_config=dict(
            depth=2, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=width,
            num_position_embeddings=16, deepstack_visual_indexes=[0],
        ),
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(50)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                size = 1.0 if "embed_tokens" in name else 0.5 / parameter[0].numel() ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
    return model.eval().requires_grad_(False)


class _TextOnly:
    """The one method of ``Qwen3VLProcessor`` that a prompt without images needs."""

    @staticmethod
    def create_mm_token_type_ids(batch: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in batch]


@torch.no_grad()
def encode(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Prompt embedding ``(tokens, width)`` float32 from token ids, by diffusers' own ``get_qwen3vl_prompt_embeds``."""
    from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

    return get_qwen3vl_prompt_embeds(model, _TextOnly(), list(ids), text_encoder_layer=LAYER)[0].float()
