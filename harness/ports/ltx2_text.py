"""LTX-2's prompt path: a Gemma tokenizer, a Gemma 3 encoder of which every layer's hidden state counts, and connectors that make of them one
context of fixed length for the video stream and one for the audio stream.

Token ids are the currency, as in the dataset: upstream's parameter is a string, so ids travel inside one (`PromptIds`).

Without a checkpoint the tokenizer is the real class with the byte alphabet, ASCII and a few merges as vocabulary; encoder and connectors are the real
classes with seeded weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loudfail.harness.violation import Unavailable

if TYPE_CHECKING:
    from loudfail.harness.world import Rank

#: A few merges, so that the ids of two pieces of text are not those of both together, as with the released vocabulary.
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("r", "a"), ("ra", "in"), ("▁", "rain"), ("b", "e"), ("l", "l"), ("be", "ll"))
#: Layers of the tiny encoder; tokens of a context, which a request may choose, as many as the longest prompt of the checks needs; and the published
#: number of registers, of which a context is a multiple.
LAYERS, TOKENS, REGISTERS = 2, 384, 128


def tokenizer(weights: str | None) -> Any:
    """The tokenizer of a checkpoint folder, or the tiny one."""
    from transformers import GemmaTokenizer

    if weights is not None:
        return GemmaTokenizer.from_pretrained(_folder(weights, "tokenizer"), local_files_only=True)
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    words += ["".join(pair) for pair in MERGES]
    return GemmaTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=list(MERGES), add_bos_token=True, model_max_length=TOKENS)


def encoder(weights: str | None, width: int, dtype: str) -> Any:
    """The text encoder of a checkpoint folder, or the tiny one with hidden states of ``width``."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig
    from transformers.utils import logging

    if weights is not None:
        folder = _folder(weights, "text_encoder")
        return _cast(Gemma3ForConditionalGeneration.from_pretrained(folder, local_files_only=True), dtype)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # of its own default rope parameters
    text = Gemma3TextConfig(
        vocab_size=len(tokenizer(None)), hidden_size=width, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=TOKENS, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    logging.set_verbosity(level)
    return _cast(_seed(Gemma3ForConditionalGeneration(config)), dtype)


def connectors(weights: str | None, width: int, dtype: str) -> Any:
    """``LTX2TextConnectors`` of a checkpoint folder, or tiny ones for hidden states of ``width``."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    if weights is not None:
        return _cast(LTX2TextConnectors.from_pretrained(_folder(weights, "connectors"), local_files_only=True), dtype)
    shape = {f"{m}_connector_{name}": value for m in ("video", "audio") for name, value in dict(
        num_attention_heads=4, attention_head_dim=width // 4, num_layers=1, num_learnable_registers=REGISTERS).items()}  # fmt: skip
    model = _seed(LTX2TextConnectors(caption_channels=width, text_proj_in_factor=LAYERS + 1, rope_type="split", **shape))
    with torch.no_grad():  # of so many registers, the few tokens of a prompt must stand out, as they do in a trained one
        model.text_proj_in.weight.mul_(3)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                parameter.fill_(2.0)
    return _cast(model, dtype)


def _cast(model: Any, dtype: str) -> Any:
    """Ready to run, in that dtype."""
    model = model.eval().requires_grad_(False)
    return model if dtype == "float32" else model.to(getattr(torch, dtype))


@torch.no_grad()
def _seed(model: Any) -> Any:
    """Seeded weights that keep the size of what passes through them."""
    generator = torch.Generator().manual_seed(51)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            size = 1.0 if "embed_tokens" in name or "registers" in name else 0.7 / parameter.shape[1] ** 0.5
            parameter.normal_(generator=generator).mul_(size)
        else:
            parameter.fill_(float(name.endswith(("norm_q.weight", "norm_k.weight"))))  # Gemma's norms scale by 1 + weight
    return model


class PromptIds(str):
    """A prompt that already is token ids, for upstream code whose parameter is a string. Use with `IdTokenizer`."""

    ids: tuple[int, ...]

    def __new__(cls, ids: Sequence[int]) -> PromptIds:
        prompt = super().__new__(cls, " ".join(map(str, ids)))
        prompt.ids = tuple(ids)
        return prompt

    def strip(self, chars: str | None = None, /) -> PromptIds:
        return self


class IdTokenizer:
    """A tokenizer that passes `PromptIds` through and pads them as the real one does."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self.words, name)

    def __call__(self, text: Any, *, padding: Any = False, max_length: int = TOKENS, return_tensors: str | None = None, **_: Any) -> Any:
        from transformers import BatchEncoding

        prompts: list[Any] = [text] if isinstance(text, str) else list(text)
        rows = [list(one.ids)[:max_length] for one in prompts]
        if padding:
            return self.words.pad({"input_ids": rows}, padding=padding, max_length=max_length, return_tensors=return_tensors)
        return BatchEncoding({"input_ids": rows[0] if isinstance(text, str) else rows})


@dataclass(frozen=True)
class Context:
    """A prompt as LTX-2's transformer gets it.

    Attributes:
        embeds: ``(tokens, width · (layers + 1))`` float32, every layer's hidden state of each token of the prompt.
        video, audio: ``(384, width)`` float32, the connectors' contexts.
        mask: ``(384,)`` int64, 1 where the context is attended.
        ids: the token ids that arrived at the encoder's embedding, read off its input, padding left out.
    """

    embeds: torch.Tensor
    video: torch.Tensor
    audio: torch.Tensor
    mask: torch.Tensor
    ids: tuple[int, ...]

    def extra(self) -> dict[str, Any]:
        """What goes into `Conditions.extra`."""
        return {"video_context": self.video, "audio_context": self.audio, "mask": self.mask, "encoder_ids": self.ids}


@torch.no_grad()
def encode(pipe: Any, connect: Any, ids: Sequence[int]) -> Context:
    """Encode token ids by a pipeline's own prompt method and connectors; works on both frameworks' pipelines.

    Args:
        pipe: has ``text_encoder``, an `IdTokenizer`, and ``encode_prompt``.
        connect: the connectors.
        ids: token ids of the prompt.

    Raises:
        ValueError: no ids, or more than a context holds.
    """
    if not 0 < len(ids) <= TOKENS:
        raise ValueError(f"the prompt has {len(ids)} token ids; LTX-2 takes 1 to {TOKENS}")
    seen: list[torch.Tensor] = []
    handle = pipe.text_encoder.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    try:
        embeds, mask, _, _ = pipe.encode_prompt(prompt=PromptIds(ids), do_classifier_free_guidance=False, max_sequence_length=TOKENS)
    finally:
        handle.remove()
    video, audio, attended = connect(embeds.to(next(connect.parameters()).dtype), mask, padding_side="left")
    real = mask[0].bool()
    ids = tuple(seen[0][real].tolist())
    return Context(embeds[0, real].float().cpu(), video[0].float().cpu(), audio[0].float().cpu(), attended[0].cpu(), ids)


def _folder(weights: str, name: str) -> Path:
    folder = Path(weights) / name
    if not folder.is_dir():
        raise Unavailable(f"no folder {folder}; --weights wants a Diffusers checkpoint with {name}/")
    return folder


# ------------------------------------------------------------------------------------------------------- what follows runs in the ranks


def load_rollout_encoder(rank: Rank, weights: str | None, width: int, dtype: str, states: Mapping[str, Mapping[str, torch.Tensor]] | None) -> None:
    """vLLM-Omni's prompt path in rank 0: its own conditioning around the same encoder and connector classes.

    Args:
        weights: checkpoint folder that is read in the rank. None: ``states`` holds the trainer's ``text_encoder`` and ``connectors``.
    """
    if rank.rank != 0:
        return
    from vllm_omni.diffusion.models.ltx2.ltx2_conditioning import LTXTextConditioningMixin

    class Conditioning(LTXTextConditioningMixin):
        device = torch.device(rank.device)

    pipe = Conditioning()
    pipe.tokenizer, pipe.text_encoder, pipe.connectors = (
        IdTokenizer(tokenizer(weights)),
        encoder(weights, width, dtype).to(rank.device),
        connectors(weights, width, dtype).to(rank.device),
    )
    for name, state in (states or {}).items():
        getattr(pipe, name).load_state_dict(state)
    rank.state["text_encoder"] = pipe


def rollout_encode(rank: Rank, ids: Sequence[int]) -> Context | None:
    """Encode ids in rank 0."""
    if rank.rank != 0:
        return None
    pipe = rank.state["text_encoder"]
    return encode(pipe, pipe.connectors, ids)


def rollout_encoder_classes(rank: Rank) -> list[str]:
    if rank.rank != 0:
        return []
    pipe = rank.state["text_encoder"]
    kinds = (type(pipe).__mro__[1], type(pipe.text_encoder), type(pipe.connectors))
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
