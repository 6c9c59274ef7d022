"""Faults of the prompt path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault
from loudfail.invariants.faults.conventions import no_condition, other_prompt

IDS, ALIKE = "prompts::the_rollouts_encoder_gets_the_ids_of_the_dataset", "prompts::trainer_and_rollout_embed_a_prompt_alike"
EVERY, DIFFERENT = "prompts::every_token_is_encoded", "prompts::different_prompts_have_different_embeddings"
CARRY, SWAP = (
    "prompts::conditions_carry_the_embedding_of_their_own_prompt",
    "prompts::swapping_two_prompts_swaps_what_is_said_of_the_same_latents",
)
HEARD = "prompts::the_prompt_is_heard_in_every_modality"
DATASET = "prompts::the_dataset_holds_the_ids_that_the_vendors_pipeline_encodes"
AS_VENDOR = "prompts::a_prompt_conditions_the_model_as_in_the_vendors_pipeline"


def other_ids(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the ids on their way to the rollout's encoder."""
    return inject.replace(port, "rollout_prompt", lambda original: lambda ids: original(change(tuple(ids))))


@contextmanager
def other_embedding(port: Port, change: Any) -> Iterator[None]:
    """Change what the trainer's encoder gives, in the conditions too, and not what the rollout has from it where it is the same."""
    asked = {"changed": 0, "by the rollout": 0}

    def encoder(original: Any) -> Any:
        def encode_prompt(ids: Any) -> Any:
            if asked["by the rollout"]:
                return original(ids)
            asked["changed"] += 1
            return change(original, tuple(ids))

        return encode_prompt

    def rollout(original: Any) -> Any:
        def rollout_prompt(ids: Any) -> Any:
            asked["by the rollout"] += 1
            try:
                return original(ids)
            finally:
                asked["by the rollout"] -= 1

        return rollout_prompt

    def conditioned(original: Any) -> Any:
        def conditions(case: Any) -> Any:
            before = asked["changed"]
            made = original(case)
            if asked["changed"] > before:
                return made
            return [replace(one, embeds=change(lambda ids, one=one: one.embeds, tuple(one.prompt_ids))) for one in made]

        return conditions

    with ExitStack() as stack:
        for method, make in (("encode_prompt", encoder), ("rollout_prompt", rollout), ("conditions", conditioned)):
            stack.enter_context(inject.replace(port, method, make))
        yield


@fault("prompt", catches=[IDS], source="verl-project/verl-omni commit 786dd36c; sgl-project/sglang PR #26555", ports=("h3", "ltx2"))
def the_rollout_tokenizes_the_decoded_prompt(port: Port) -> Iterator[None]:
    """Ids are decoded to text and tokenized again inside the engine."""
    with other_ids(port, lambda ids: port.tokenize(port.tokenizer.decode(ids))):
        yield


@fault("prompt", catches=[IDS, ALIKE], source="verl-project/verl-omni commit 786dd36c", cause="chat template")
def the_rollout_wraps_the_prompt_in_a_chat_template(port: Port) -> Iterator[None]:
    """A generic agent loop puts the prompt into a chat turn."""
    with other_ids(port, lambda ids: (*port.tokenize("<|im_start|>user\n"), *ids, *port.tokenize("<|im_end|>\n"))):
        yield


@fault("prompt", catches=[IDS, ALIKE, EVERY], source="verl-project/verl-omni commit b6cd74b4, PR #357", cause="prompt truncated")
def the_rollout_cuts_the_prompt(port: Port) -> Iterator[None]:
    """Prompts are cut to their first tokens before the rollout's encoder."""
    with other_ids(port, lambda ids: ids[:3]):
        yield


@fault("prompt", catches=[EVERY], source="verl-project/verl-omni commit b6cd74b4, PR #357", cause="embedding truncated")
def the_trainer_crops_the_embedding(port: Port) -> Iterator[None]:
    """A negative pad amount crops the trainer's embedding of long prompts."""
    with other_embedding(port, lambda encode, ids: encode(ids)[:16]):
        yield


@fault("prompt", "objective", catches=[ALIKE, CARRY], source="huggingface/diffusers#13931, commit 7bf00006aa", cause="embedding reversed")
def the_trainers_embedding_is_reversed(port: Port) -> Iterator[None]:
    """Token order is reversed on the way out of the trainer's encoder."""
    with other_embedding(port, lambda encode, ids: encode(ids).flip(0)):
        yield


@fault("prompt", catches=[ALIKE, EVERY], source="mosaicml/diffusion PR #147, #149", cause="embedding padded")
def the_trainers_embedding_is_padded(port: Port) -> Iterator[None]:
    """The trainer pads embeddings with zero rows that no mask takes away; the rollout does not."""
    import torch

    with other_embedding(port, lambda encode, ids: torch.cat([encode(ids), torch.zeros_like(encode(ids)[:2])])):
        yield


def hidden_layer(port: Port, shift: int) -> AbstractContextManager[Any]:
    """Read the upstream conditioner at another hidden layer."""
    from diffusers.modular_pipelines.minimax_h3 import encoders

    def make(original: Any) -> Any:
        def embed(*args: Any, text_encoder_layer: int = 50, **kwargs: Any) -> Any:
            return original(*args, text_encoder_layer=text_encoder_layer + shift, **kwargs)

        return embed

    return inject.replace(encoders, "get_qwen3vl_prompt_embeds", make, clear=(type(port)._encode,))


@fault("prompt", "objective", catches=[ALIKE, CARRY], ports=("h3",))
def the_trainer_reads_the_layer_before(port: Port) -> Iterator[None]:
    """The upstream embedding function reads hidden state 49 instead of 50."""
    with hidden_layer(port, -1):
        yield


@fault("prompt", "objective", catches=[ALIKE, CARRY], ports=("h3",))
def the_trainer_reads_the_last_hidden_state(port: Port) -> Iterator[None]:
    """The trainer's embedding is the last hidden state, behind the final norm, as encoders are used elsewhere."""
    from diffusers.modular_pipelines.minimax_h3 import encoders

    def make(original: Any) -> Any:
        def embed(text_encoder: Any, processor: Any, token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
            import torch

            original(text_encoder, processor, token_ids, *args, **kwargs)
            return text_encoder.model(input_ids=torch.tensor([token_ids], device=text_encoder.device)).last_hidden_state

        return embed

    with inject.replace(encoders, "get_qwen3vl_prompt_embeds", make, clear=(type(port)._encode,)):
        yield


@fault("prompt", "objective", catches=[DIFFERENT, ALIKE], source="Comfy-Org/ComfyUI#15805", cause="embedding constant")
def every_prompt_has_one_embedding(port: Port) -> Iterator[None]:
    """Embeddings do not depend on the tokens, only on their number."""
    with other_embedding(port, lambda encode, ids: encode(ids[:1] * len(ids)) * 0 + 1):
        yield


@fault("prompt", "objective", catches=[CARRY], source="verl-project/verl-omni commit 2e08eeff, #25", cause="another sample's conditions")
def the_prompts_of_a_batch_are_exchanged(port: Port) -> Iterator[None]:
    """Conditions of a batch are in another order than its samples."""
    with inject.replace(port, "conditions", lambda original: lambda case: list(reversed(original(case)))):
        yield


@fault("prompt", "objective", catches=[CARRY], source="Tencent-Hunyuan/UniRL#326")
def training_encodes_a_stripped_prompt(port: Port) -> Iterator[None]:
    """Training conditions are built from the prompt stripped, with accents composed and cut, the dataset's ids are not."""
    import unicodedata
    from dataclasses import replace as with_fields

    def make(original: Any) -> Any:
        return lambda case: original(
            with_fields(case, prompts=tuple(unicodedata.normalize("NFC", p).strip()[: len(p) // 2] or "." for p in case.prompts))
        )

    with inject.replace(port, "conditions", make):
        yield


@fault(
    "objective",
    catches=[SWAP, "conventions::the_samples_of_a_batch_do_not_influence_each_other"],
    source="Tencent-Hunyuan/UniRL#326",
    cause="another sample's conditions",
)
def samples_are_denoised_under_the_next_samples_prompt(port: Port) -> Iterator[None]:
    """Inside a batch, each sample gets its neighbour's prompt."""

    def make(original: Any) -> Any:
        return lambda latents, sigmas, conditions: original(latents, sigmas, [*conditions[1:], conditions[0]])

    with inject.replace(port, "predict_velocity", make):
        yield


@fault("objective", catches=[HEARD], source="Comfy-Org/ComfyUI#15805", unless=no_condition, cause="prompt missing")
def the_prompt_has_no_effect(port: Port) -> Iterator[None]:
    """The model is given one prompt, whatever the sample's."""

    def make(original: Any) -> Any:
        def predict(latents: Any, sigmas: Any, conditions: Any) -> Any:
            fixed = port.tokenize("rain")
            return original(latents, sigmas, [other_prompt(port, c, fixed) for c in conditions])

        return predict

    with inject.replace(port, "predict_velocity", make):
        yield


def other_text(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the text before it is tokenized, for the dataset and so for trainer and rollout alike."""
    return inject.replace(port, "tokenize", lambda original: lambda text: original(change(text) or text))


def strips(port: Port) -> str:
    same = port.reference_prompt(" rain ") == port.reference_prompt("rain")
    return "the vendor's pipeline strips prompts itself" if same else ""


@fault("prompt", "reference", catches=[DATASET, AS_VENDOR], source="Tencent-Hunyuan/UniRL#326", unless=strips, cause="text edited")
def the_dataset_strips_the_text(port: Port) -> Iterator[None]:
    """Prompts lose the white space around them before they are tokenized."""
    with other_text(port, str.strip):
        yield


@fault("prompt", "reference", catches=[DATASET], cause="text edited")
def the_dataset_lower_cases_the_text(port: Port) -> Iterator[None]:
    """Prompts are lower-cased before they are tokenized, as for older text encoders."""
    with other_text(port, str.lower):
        yield


@fault("prompt", "reference", catches=[DATASET], source="verl-project/verl-omni commit 786dd36c", cause="text edited")
def special_tokens_are_parsed_away(port: Port) -> Iterator[None]:
    """Text that spells a special token is removed from prompts as if it were markup."""
    import re

    with other_text(port, lambda text: re.sub(r"<\|\w+\|>", "", text)):
        yield


@fault("prompt", "reference", catches=[DATASET, AS_VENDOR], source="verl-project/verl-omni commit b6cd74b4, PR #357", cause="prompt truncated")
def the_dataset_cuts_long_prompts(port: Port) -> Iterator[None]:
    """The dataset stores the first 128 tokens."""
    with inject.replace(port, "tokenize", lambda original: lambda text: original(text)[:128]):
        yield


@fault(
    "objective",
    "prompt",
    "reference",
    catches=[AS_VENDOR],
    source="verl-project/verl-omni commit b6cd74b4, PR #357",
    unless=no_condition,
    cause="prompt truncated",
)
def conditions_are_cut(port: Port) -> Iterator[None]:
    """Conditions keep the first 128 rows of an embedding, for trainer and rollout alike."""

    def cut(condition: Any) -> Any:
        tags = {name: condition.extra[name][:128] for name in ("tags",) if name in condition.extra}
        return replace(condition, embeds=condition.embeds[:128], extra=condition.extra | tags)

    with inject.replace(port, "condition", lambda original: lambda *args, **kwargs: cut(original(*args, **kwargs))):
        yield


@fault("prompt", "reference", catches=[DATASET, AS_VENDOR], ports=("ltx2",), cause="text not edited")
def the_dataset_keeps_white_space_that_the_pipeline_strips(port: Port) -> Iterator[None]:
    """Prompts are tokenized with the white space around them, which the vendor's pipeline takes away."""
    with inject.replace(port, "tokenize", lambda _: lambda text: tuple(port.tokenizer(text)["input_ids"])):
        yield


@fault("prompt", "reference", catches=[DATASET, AS_VENDOR], ports=("ltx2",), cause="first token missing")
def the_dataset_has_no_first_token(port: Port) -> Iterator[None]:
    """Ids are stored without the token that begins a text."""
    with inject.replace(port, "tokenize", lambda original: lambda text: original(text)[1:] or original(text)):
        yield


def _other_stack(change: Any) -> AbstractContextManager[Any]:
    """Change the stack of hidden states that the trainer's upstream pipeline makes; the rollout's is its own."""
    from diffusers import LTX2Pipeline

    from loudfail.harness.ports.ltx2 import LTX2

    def make(original: Any) -> Any:
        def embed(self: Any, *args: Any, **kwargs: Any) -> Any:
            embeds, mask = original(self, *args, **kwargs)
            return change(embeds.unflatten(2, (self.text_encoder.config.text_config.hidden_size, -1))).flatten(2), mask

        return embed

    return inject.replace(LTX2Pipeline, "_get_gemma_prompt_embeds", make, clear=(LTX2._encode,))


@fault("prompt", "objective", catches=[ALIKE, CARRY], ports=("ltx2",))
def the_trainer_stacks_the_layers_in_reverse(port: Port) -> Iterator[None]:
    """The trainer's stack of hidden states begins with the last layer."""
    with _other_stack(lambda layers: layers.flip(-1)):
        yield


@fault("prompt", "objective", catches=[ALIKE, CARRY], ports=("ltx2",))
def the_trainer_reads_the_last_layer_only(port: Port) -> Iterator[None]:
    """Every layer of the trainer's stack is the last hidden state, as encoders are used elsewhere."""
    with _other_stack(lambda layers: layers[..., -1:].expand_as(layers)):
        yield


@fault("prompt", "objective", "reference", catches=[AS_VENDOR], ports=("ltx2",))
def the_streams_have_each_others_context(port: Port) -> Iterator[None]:
    """The connectors' two contexts are exchanged, for trainer and rollout alike."""

    def swap(condition: Any) -> Any:
        return replace(
            condition, extra=condition.extra | {"video_context": condition.extra["audio_context"], "audio_context": condition.extra["video_context"]}
        )

    with inject.replace(port, "condition", lambda original: lambda *args, **kwargs: swap(original(*args, **kwargs))):
        yield


@fault("prompt", "presentation", "reference", "engine", catches=["conditions::the_rollouts_encoder_is_shown_the_given_frames"], ports=("ltx2",))
def the_rollouts_connectors_have_other_registers(port: Port) -> Iterator[None]:
    """The rollout's connectors fill the context with registers of their own."""

    def make(original: Any) -> Any:
        def encode(ids: Any) -> Any:
            context = original(ids)
            return replace(context, video=context.video.roll(1, 0), audio=context.audio.roll(1, 0))

        return encode

    with inject.replace(port, "_encode_in_rollout", make):
        yield
