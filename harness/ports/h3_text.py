"""MiniMax H3's prompt path: a Qwen2 byte-level tokenizer and a Qwen3-VL conditioner read after its 50th decoder layer.

Token ids are the currency. A prompt enters the trainer's encoder and the rollout's encoder as the ids that the dataset stores, never as text: ids
that were joined from segments, cut at a length or made with other special tokens do not survive decoding and tokenizing again.

The presentation (``<Picture i>: `` and a vision block a keyframe, then the prompt; rows of a vision block tagged as video) is built by upstream on
both sides: diffusers' block for the trainer, vLLM-Omni's builder for the rollout.

Without a checkpoint the tokenizer is the real class with the byte alphabet and a few merges as vocabulary, and the encoder is the real class with
51 layers, a small vision tower and seeded weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loudfail.harness.violation import Unavailable

if TYPE_CHECKING:
    import numpy as np

    from loudfail.harness.world import Rank

LAYER = 50
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: A few merges, so that decoding and tokenizing again is not the identity on ids, as with the released vocabulary.
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("r", "a"), ("ra", "in"), ("Ġ", "a"), ("Ġ", "the"), ("b", "e"), ("l", "l"), ("be", "ll"))


def tokenizer(weights: str | None) -> Any:
    """The tokenizer of a checkpoint folder, or the tiny one."""
    from transformers import Qwen2TokenizerFast

    if weights is not None:
        return Qwen2TokenizerFast.from_pretrained(_folder(weights, "tokenizer"), local_files_only=True)
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tiny = Qwen2TokenizerFast(vocab={word: index for index, word in enumerate(words)}, merges=list(MERGES), unk_token=None)
    tiny.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    return tiny


def processor(weights: str | None, words: Any) -> Any:
    """``Qwen3VLProcessor`` around a tokenizer and the PIL image processor (no torchvision), without a video processor, which keyframes do not need.

    The tiny one cuts images into at most 16 patches of 4 × 4 pixels.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl import Qwen3VLProcessor

    if weights is not None:
        images = Qwen2VLImageProcessorPil.from_pretrained(_folder(weights, "processor"), local_files_only=True)
    else:
        images = Qwen2VLImageProcessorPil(
            patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=256, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )

    class ImageProcessor(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument_name == "video_processor" else super().check_argument_for_proper_class(argument_name, argument)

    return ImageProcessor(image_processor=images, tokenizer=words, video_processor=None)


def encoder(weights: str | None, width: int) -> Any:
    """The conditioner of a checkpoint folder, or the tiny one with embeddings of ``width``."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    if weights is not None:
        return Qwen3VLForConditionalGeneration.from_pretrained(_folder(weights, "text_encoder"), local_files_only=True).eval().requires_grad_(False)
    tiny = tokenizer(None)
    ids = {name: tiny.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    head_dim = 8
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tiny), hidden_size=width, intermediate_size=64, num_hidden_layers=LAYER + 1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512,
            rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        ),
        vision_config=dict(
            depth=2, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
            out_hidden_size=width, num_position_embeddings=16, deepstack_visual_indexes=[0],
        ),
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
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


@dataclass(frozen=True)
class Presentation:
    """A prompt as the transformer gets it.

    Attributes:
        embeds: ``(tokens, width)`` float32, the hidden state after the encoder's 50th layer.
        tags: ``(tokens,)`` int64, H3's modality tag of each row: 1 text, 0 vision block. None where the encoder was given ids only.
        ids: the token ids that arrived at the encoder's embedding, read off its input.
    """

    embeds: torch.Tensor
    tags: torch.Tensor | None
    ids: tuple[int, ...]


class PromptIds(str):
    """A prompt that already is token ids, for upstream code whose parameter is a string. Use with `IdTokenizer`."""

    ids: tuple[int, ...]

    def __new__(cls, ids: Sequence[int]) -> PromptIds:
        prompt = super().__new__(cls, " ".join(map(str, ids)))
        prompt.ids = tuple(ids)
        return prompt


class IdTokenizer:
    """A tokenizer that passes `PromptIds` through and tokenizes everything else (the labels that upstream adds)."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __call__(self, text: str, **options: Any) -> Any:
        return {"input_ids": list(text.ids)} if isinstance(text, PromptIds) else self.words(text, **options)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.words.convert_tokens_to_ids(token)


def pipeline(model: Any, words: Any, images: Any) -> Any:
    """diffusers' presentation block with an encoder, a tokenizer and a processor."""
    from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3FL2VATextEncoderStep

    from loudfail.harness.ports.h3_media import pipeline_of

    return pipeline_of(MiniMaxH3FL2VATextEncoderStep, text_encoder=model, tokenizer=IdTokenizer(words), processor=images)


def present(pipe: Any, ids: Sequence[int], images: Sequence[np.ndarray[Any, Any]] = ()) -> Presentation:
    """Encode token ids, with keyframes before them, by diffusers' ``MiniMaxH3FL2VATextEncoderStep``; the ids are read off the encoder by a hook.

    Args:
        pipe: what `pipeline` returns.
        ids: token ids of the prompt.
        images: uint8 ``(H, W, 3)`` keyframes in packed order.

    Raises:
        ValueError: no ids.
    """
    if not ids:
        raise ValueError("the prompt has no token ids; H3 needs at least one")
    seen: list[tuple[int, ...]] = []
    handle = pipe.text_encoder.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0][0].tolist())))
    try:
        state = pipe(prompt=PromptIds(ids), keyframes=list(images))
    finally:
        handle.remove()
    return Presentation(state.get("prompt_embeds")[0].float().cpu(), state.get("text_token_tags"), seen[0])


def _folder(weights: str, name: str) -> Path:
    folder = Path(weights) / name
    if not folder.is_dir():
        raise Unavailable(f"no folder {folder}; --weights wants a Diffusers checkpoint with {name}/")
    return folder


# ------------------------------------------------------------------------------------------------------- what follows runs in the ranks


def load_rollout_encoder(rank: Rank, weights: str | None, config: Mapping[str, Any], state: Mapping[str, torch.Tensor] | None, dtype: str) -> None:
    """vLLM-Omni's own H3 text encoder (``MiniMaxH3Qwen3VLEncoder``) in rank 0, upstream's default of one encoder rank whatever the degree.

    Args:
        weights: checkpoint folder; its ``text_encoder/`` is read in the rank. None: ``config`` and ``state`` are the trainer's encoder.
        dtype: ``float32`` runs upstream's bfloat16 class in float32, so that parity is tight.
    """
    if rank.rank != 0:
        return
    import tempfile

    from transformers import Qwen3VLConfig
    from vllm_omni.diffusion.models.minimax_h3 import encoder as upstream
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import _SingleRankEncoderGroup

    upstream.MINIMAX_H3_QWEN3VL_HIDDEN_DIM = config["text_config"]["hidden_size"]  # a constant of the released model
    with tempfile.TemporaryDirectory() as folder:  # upstream reads its configuration from a folder
        Qwen3VLConfig(**config).save_pretrained(folder)
        model = upstream.MiniMaxH3Qwen3VLEncoder(
            folder, device=torch.device(rank.device), load_model=True, encoder_group=_SingleRankEncoderGroup(rank=0)
        )
    model.to(getattr(torch, dtype))
    model.load_weights(iter(state.items()) if state is not None else _checkpoint(weights))
    for module in model.modules():
        # vLLM's CPU kernels want their linears prepared; the fused ones upstream reads by weight, so they must stay as they are.
        if isinstance(module, upstream.MiniMaxH3Qwen3VLRowParallelLinear):
            module.quant_method.process_weights_after_loading(module)
    words = tokenizer(weights)
    rank.state["text_encoder"] = (model.to(rank.device).eval(), IdTokenizer(words), processor(weights, words).image_processor)


def rollout_encode(rank: Rank, ids: Sequence[int], images: Sequence[np.ndarray[Any, Any]] = ()) -> Presentation | None:
    """Encode ids in rank 0: vLLM-Omni's presentation, then its encoder. The ids are read off the encoder's embedding, the hidden state before
    upstream's last cast to bfloat16."""
    if rank.rank != 0:
        return None
    from vllm_omni.model_executor.models.minimax_h3.preprocessing import build_minimax_h3_presentation

    model, words, image_processor = rank.state["text_encoder"]
    vision = dict(image_processor(images=list(images), return_tensors="pt")) if len(images) else {}
    tokens, tags = build_minimax_h3_presentation(
        words, prompt=PromptIds(ids), task="fl2va" if vision else "t2va", condition_labels=[], image_grid_thw=vision.get("image_grid_thw"),
        video_grid_thw=None, video_timestamps=None, merge_size=image_processor.merge_size,
    )  # fmt: skip
    seen: list[tuple[int, ...]] = []
    hidden: list[torch.Tensor] = []
    handles = [
        model.text_model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0][0].tolist()))),
        model.text_model.register_forward_hook(lambda _, args, output: hidden.append(output[0].float().cpu())),
    ]
    try:
        model(tokens, **vision)
    finally:
        for handle in handles:
            handle.remove()
    return Presentation(hidden[0].clone(), tags, seen[0])


def rollout_encoder_classes(rank: Rank) -> list[str]:
    kinds = {type(part) for part in rank.state["text_encoder"][0].modules()} if rank.rank == 0 else set()
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__name__.startswith("MiniMaxH3"))


def _checkpoint(weights: str | None) -> Any:
    from safetensors import safe_open

    for path in sorted(_folder(str(weights), "text_encoder").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dictionary
                yield name, file.get_tensor(name)
