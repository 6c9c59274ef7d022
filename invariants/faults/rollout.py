"""The rollout's model call and loop broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port, Step, Trajectory
from loudfail.harness.registry import fault
from loudfail.invariants.faults.sync import fused

VELOCITY = "rollout::the_base_velocity_is_the_actors"
EFFECT = "rollout::the_adapters_effect_is_the_actors"
REPLAY = "rollout::velocity_replay_agrees_at_every_step"
LOOP = "rollout::the_rollouts_loop_ends_where_the_vendors_does"
RECORDED = "rollout::recorded_steps_are_what_happened"
BATCH = "rollout::a_batch_is_its_samples"
RANKS = "rollout::all_ranks_return_the_same_velocity"
SAME = "rollout::the_same_noise_gives_the_same_rollout"
HEARS = "rollout::the_rollout_hears_every_modality_of_the_noise"


def _engine_velocity(change: Any) -> Any:
    """Patch the engine's model call in a rank: ``change(original)`` gets ``(self, model, latents, sigmas, conditions)``."""
    from loudfail.harness.engines import vllm_omni

    def make(original: Any) -> Any:
        def velocity(rank: Any, latents: Any, sigmas: Any, conditions: Any) -> Any:
            return change(original, rank, latents, sigmas, conditions)

        return velocity

    return inject.replace(vllm_omni, "velocity", make)


def label_is_sigma() -> Any:
    return _engine_velocity(lambda original, rank, x, s, c: original(rank, x, {m: 1 - v for m, v in s.items()}, c))


@fault("objective", "engine", "adapter", catches=[VELOCITY, EFFECT], source="verl-omni PR #383", unless=fused, cause="time flipped")
def the_engine_is_told_the_data_fraction(port: Port) -> Iterator[None]:
    """The engine's time label runs the other way than the actor's."""
    with inject.in_ranks(port, label_is_sigma):
        yield


def sign_is_data_ward() -> Any:
    return _engine_velocity(lambda original, *args: {m: -v for m, v in original(*args).items()})


@fault(
    "objective",
    "engine",
    "adapter",
    catches=[VELOCITY, EFFECT],
    source="verl-omni PR #383; splitmeanflow #2",
    unless=fused,
    cause="velocity sign flipped",
)
def the_engines_velocity_is_reversed(port: Port) -> Iterator[None]:
    """The engine's raw output is used without the sign change that its convention needs."""
    with inject.in_ranks(port, sign_is_data_ward):
        yield


def one_sigma_for_the_batch() -> Any:
    return _engine_velocity(lambda original, rank, x, s, c: original(rank, x, {m: v[:1].expand(len(v)) for m, v in s.items()}, c))


@fault(
    "objective",
    "engine",
    "adapter",
    catches=[BATCH, VELOCITY],
    source="diffusers #14355; FastVideo PR #885",
    unless=fused,
    cause="one sample's level for the batch",
)
def every_sample_gets_the_first_ones_sigma(port: Port) -> Iterator[None]:
    """The batch is denoised at the noise level of its first sample."""
    with inject.in_ranks(port, one_sigma_for_the_batch):
        yield


def last_rank_drifts() -> Any:
    def change(original: Any, rank: Any, *args: Any) -> Any:
        return {m: v * (1 + 1e-3 * (rank.rank == rank.size - 1 and rank.size > 1)) for m, v in original(rank, *args).items()}

    return _engine_velocity(change)


@fault("objective", "engine", catches=[RANKS], source="verl-omni commit 902d56fa (#349)", degrees=(2, 4), unless=fused, cause="ranks disagree")
def one_rank_returns_something_else(port: Port) -> Iterator[None]:
    """The last rank's result differs by a thousandth; the driver reads rank 0."""
    with inject.in_ranks(port, last_rank_drifts):
        yield


def rows_of_ranks_mix() -> Any:
    def change(original: Any, rank: Any, *args: Any) -> Any:
        result = original(rank, *args)
        return {m: torch.full_like(v, float("nan")) for m, v in result.items()} if rank.size == 1 else result

    return _engine_velocity(change)


@fault("objective", "engine", catches=[RANKS], degrees=(1,), unless=fused, cause="not a number")
def the_single_rank_returns_nan(port: Port) -> Iterator[None]:
    """At tensor parallel 1 the velocity is not a number."""
    with inject.in_ranks(port, rows_of_ranks_mix):
        yield


def padding_is_attended() -> Any:
    from vllm_omni.diffusion.attention.backends import sdpa

    return inject.replace(sdpa, "_maybe_reshape_attn_mask", lambda original: lambda *args, **kwargs: None)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY, LOOP], source="mosaicml/diffusion #147, #149", ports=["h3"])
def padding_rows_are_attended(port: Port) -> Iterator[None]:
    """The engine pads its packed sequence to a multiple of 64 rows and attends to the padding."""
    with inject.in_ranks(port, padding_is_attended):
        yield


def prompt_is_dropped() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch

    def make(original: Any) -> Any:
        return lambda self, *, text_embeddings, **kwargs: original(self, text_embeddings=torch.zeros_like(text_embeddings), **kwargs)

    return inject.replace(MiniMaxH3DenoiseBranch, "__init__", make)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY], source="ComfyUI #15805", ports=["h3"], cause="prompt missing")
def the_engine_ignores_the_prompt(port: Port) -> Iterator[None]:
    """The prompt embedding that the engine uses is zero."""
    with inject.in_ranks(port, prompt_is_dropped):
        yield


def two_tokens_swapped() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch

    def make(original: Any) -> Any:
        def init(self: Any, *, text_embeddings: torch.Tensor, **kwargs: Any) -> None:
            order = torch.arange(len(text_embeddings))
            if len(order) > 2:
                order[[1, 2]] = order[[2, 1]]
            original(self, text_embeddings=text_embeddings[order], **kwargs)

        return init

    return inject.replace(MiniMaxH3DenoiseBranch, "__init__", make)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY], source="verl-omni commit 786dd36c (token ids)", ports=["h3"], exact=True)
def two_prompt_tokens_change_places(port: Port) -> Iterator[None]:
    """The engine sees the prompt with two neighbouring tokens exchanged."""
    with inject.in_ranks(port, two_tokens_swapped):
        yield


def audio_walks_the_video_schedule() -> Any:
    from loudfail.harness.ports.h3 import H3Fused

    return inject.replace(H3Fused, "grid", lambda original: lambda self, calls: dict.fromkeys(("video", "audio"), original(self, calls)["video"]))


@fault(
    "objective", "vendor", "engine", "adapter", catches=[LOOP], source="ostris/ai-toolkit #720", ports=["h3"], cause="one modality at another's level"
)
def audio_is_sampled_on_the_videos_schedule(port: Port) -> Iterator[None]:
    """One schedule serves both modalities in the rollout; it is self-consistent, so that only the vendor's loop tells."""
    with inject.in_ranks(port, audio_walks_the_video_schedule):
        yield


def audio_label_is_the_videos() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch

    def make(original: Any) -> Any:
        return lambda self, timesteps, *, t_video, t_audio, **kwargs: original(self, timesteps, t_video=t_video, t_audio=t_video, **kwargs)

    return inject.replace(MiniMaxH3DenoiseBranch, "fill_timesteps", make)


@fault(
    "objective",
    "vendor",
    "engine",
    "adapter",
    catches=[VELOCITY, REPLAY, LOOP],
    source="ostris/ai-toolkit #720",
    ports=["h3"],
    cause="one modality at another's level",
)
def audio_rows_carry_the_videos_time(port: Port) -> Iterator[None]:
    """Audio rows walk their own schedule and are labelled with the video's time."""
    with inject.in_ranks(port, audio_label_is_the_videos):
        yield


def rotary_positions_start_at_zero() -> Any:
    from vllm_omni.diffusion.models.minimax_h3 import packed_sequence

    def make(original: Any) -> Any:
        return lambda n, origin: original(n, 0.0)

    return inject.replace(packed_sequence, "_video_t_grid", make)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY], source="vllm-omni #4443; verl-omni commit fe48aeee", ports=["h3"], exact=True)
def video_positions_ignore_the_prompts_length(port: Port) -> Iterator[None]:
    """The engine's rotary clock of the video starts at zero instead of after the prompt."""
    with inject.in_ranks(port, rotary_positions_start_at_zero):
        yield


def _recorded(port: Port, change: Any) -> Any:
    """Patch what the driver gets back from a rollout (the driver side of the engine): ``change(original, noise, calls, conditions)``."""
    return inject.in_engines(port, "rollout", lambda original: lambda noise, calls, conditions: change(original, noise, calls, conditions))


@fault("objective", "engine", "adapter", catches=[RECORDED, REPLAY], source="verl-omni issue #280", cause="record one step off")
def sigmas_are_recorded_one_step_late(port: Port) -> Iterator[None]:
    """Each recorded step carries the sigma of the step before."""

    def change(original: Any, noise: Any, calls: int, conditions: Any) -> Trajectory:
        steps = original(noise, calls, conditions).steps
        return Trajectory([Step(s.latents, before.sigmas, s.velocity, s.after) for s, before in zip(steps, [steps[0], *steps[:-1]], strict=True)])

    with _recorded(port, change):
        yield


@fault("objective", "engine", "adapter", catches=[RECORDED, REPLAY], cause="record one step off")
def latents_are_recorded_after_the_step(port: Port) -> Iterator[None]:
    """The recorder keeps the latents that came out instead of those that went in."""

    def change(original: Any, *args: Any) -> Trajectory:
        return Trajectory([Step(s.after, s.sigmas, s.velocity, s.after) for s in original(*args).steps])

    with _recorded(port, change):
        yield


@fault("objective", "engine", catches=[RECORDED], cause="a step recorded twice")
def the_last_step_is_recorded_twice(port: Port) -> Iterator[None]:
    """The record repeats its last step in place of the one before."""

    def change(original: Any, *args: Any) -> Trajectory:
        steps = original(*args).steps
        return Trajectory([*steps[:-2], steps[-1], steps[-1]])

    with _recorded(port, change):
        yield


@fault("objective", "engine", "adapter", catches=[REPLAY], source="verl-omni issue #280, PR #279", cause="a model call too few or too many")
def the_rollout_makes_one_call_less(port: Port) -> Iterator[None]:
    """A step count is adjusted once too often: N − 1 model calls."""
    with _recorded(port, lambda original, noise, calls, conditions: original(noise, calls - 1, conditions)):
        yield


@fault("objective", "engine", catches=[SAME], source="diffusers #13678, #10964")
def the_rollout_adds_noise_of_its_own(port: Port) -> Iterator[None]:
    """Hidden randomness: the given noise is mixed with fresh noise."""

    def change(original: Any, noise: Any, calls: int, conditions: Any) -> Trajectory:
        return original({m: v + 0.01 * torch.randn_like(v) for m, v in noise.items()}, calls, conditions)

    with _recorded(port, change):
        yield


@fault("objective", "engine", catches=[SAME, RECORDED, HEARS], source="verl-omni commit e71e6579 (#60)")
def every_rollout_starts_from_one_seed(port: Port) -> Iterator[None]:
    """The given noise is ignored; each rollout draws from the same seed."""

    def change(original: Any, noise: Any, calls: int, conditions: Any) -> Trajectory:
        generator = torch.Generator().manual_seed(0)
        return original({m: torch.randn(v.shape, generator=generator) for m, v in noise.items()}, calls, conditions)

    with _recorded(port, change):
        yield


@fault("objective", "engine", catches=[HEARS, RECORDED])
def the_last_modality_starts_from_one_seed(port: Port) -> Iterator[None]:
    """Only the last modality ignores its noise."""

    def change(original: Any, noise: Any, calls: int, conditions: Any) -> Trajectory:
        fixed = port.modalities[-1]
        drawn = torch.randn(noise[fixed].shape, generator=torch.Generator().manual_seed(0))
        return original(dict(noise) | {fixed: drawn}, calls, conditions)

    with _recorded(port, change):
        yield


def rounded_to_bfloat16() -> Any:
    return _engine_velocity(lambda original, *args: {m: v.bfloat16().float() for m, v in original(*args).items()})


@fault("objective", "engine", "adapter", catches=[VELOCITY, EFFECT], source="vllm-omni #2291", unless=fused, cause="rounded to bfloat16", exact=True)
def the_engine_answers_in_bfloat16(port: Port) -> Iterator[None]:
    """The engine's velocity is rounded to bfloat16 on its way out."""
    with inject.in_ranks(port, rounded_to_bfloat16):
        yield


LONG = "rollout::long_sequences_agree"
LEVELS = "rollout::the_adapter_acts_at_every_noise_level"
LATE = "rollout::velocity_replay_agrees_late_in_a_long_rollout"
MIXED = "rollout::a_batch_of_rollouts_is_its_samples"


def _without_lora(rank: Any, call: Any) -> Any:
    """Run a call with every LoRA layer of the rank switched off."""
    layers = list(rank.state["manager"]._lora_modules.values())
    saved = [layer._diffusion_lora_active_slices for layer in layers]
    for layer, slices in zip(layers, saved, strict=True):
        layer._diffusion_lora_active_slices = (False,) * len(slices)
    try:
        return call()
    finally:
        for layer, slices in zip(layers, saved, strict=True):
            layer._diffusion_lora_active_slices = slices


def lora_off_at_low_noise() -> Any:
    def change(original: Any, rank: Any, x: Any, s: Any, c: Any) -> Any:
        low = [max(float(v[i]) for v in s.values()) < 0.1 for i in range(len(c))]
        full = original(rank, x, s, c)
        bare = _without_lora(rank, lambda: original(rank, x, s, c))
        return {m: torch.stack([bare[m][i] if low[i] else full[m][i] for i in range(len(c))]) for m in full}

    return _engine_velocity(change)


@fault("objective", "engine", "adapter", catches=[LEVELS], source="vllm-omni step caches; own", unless=fused)
def the_adapter_is_off_at_low_noise(port: Port) -> Iterator[None]:
    """Below sigma 0.1 the engine computes without the adapter."""
    with inject.in_ranks(port, lora_off_at_low_noise):
        yield


def lora_off_for_long_sequences() -> Any:
    def change(original: Any, rank: Any, x: Any, s: Any, c: Any) -> Any:
        if max(len(one.embeds) for one in c) > 128:
            return _without_lora(rank, lambda: original(rank, x, s, c))
        return original(rank, x, s, c)

    return _engine_velocity(change)


@fault("objective", "engine", "adapter", catches=[LONG], unless=fused)
def the_adapter_is_off_for_long_prompts(port: Port) -> Iterator[None]:
    """With more than 128 prompt tokens the engine takes a path without the adapter."""
    with inject.in_ranks(port, lora_off_for_long_sequences):
        yield


def text_cut_at_64() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch

    def make(original: Any) -> Any:
        def init(self: Any, *, text_embeddings: torch.Tensor, **kwargs: Any) -> None:
            kept = text_embeddings.clone()
            kept[64:] = 0
            original(self, text_embeddings=kept, **kwargs)

        return init

    return inject.replace(MiniMaxH3DenoiseBranch, "__init__", make)


@fault("objective", "engine", "adapter", catches=[LONG], source="verl-omni commit b6cd74b4 (#357)", ports=["h3"], cause="prompt truncated")
def the_engine_cuts_prompts_at_64_tokens(port: Port) -> Iterator[None]:
    """The engine's prompt embedding is zero from the sixty-fifth token on."""
    with inject.in_ranks(port, text_cut_at_64):
        yield


@fault("objective", "engine", "adapter", catches=[LATE], source="vllm-omni step caches; own")
def a_long_rollout_reuses_a_velocity(port: Port) -> Iterator[None]:
    """From the eleventh call on, the rollout moves by the velocity of the tenth."""

    def change(original: Any, *args: Any) -> Trajectory:
        steps = original(*args).steps
        return Trajectory([*steps[:10], *(Step(s.latents, s.sigmas, steps[9].velocity, s.after) for s in steps[10:])])

    with _recorded(port, change):
        yield


@fault("objective", "engine", catches=[MIXED], source="verl-omni commit 2e08eeff (#25); vllm-omni #7190")
def rollouts_of_a_batch_share_the_second_prompt(port: Port) -> Iterator[None]:
    """From the third sample on, a batch of rollouts uses the second sample's conditions."""

    def change(original: Any, noise: Any, calls: int, conditions: Any) -> Trajectory:
        return original(noise, calls, [conditions[min(index, 1)] for index in range(len(conditions))])

    with _recorded(port, change):
        yield


def _call(change: Any) -> Any:
    """Change the arguments of the upstream model's call in a rank: ``change(arguments) -> arguments``."""
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformer3DModel

    return inject.replace(LTX2VideoTransformer3DModel, "forward", lambda original: lambda self, **arguments: original(self, **change(arguments)))


def _contexts(change: Any) -> Any:
    names = ("encoder_hidden_states", "audio_encoder_hidden_states")
    return _call(lambda arguments: arguments | {name: change(arguments[name]) for name in names})


def contexts_dropped() -> Any:
    return _contexts(torch.zeros_like)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY], source="ComfyUI #15805", ports=["ltx2"])
def the_engine_has_no_context(port: Port) -> Iterator[None]:
    """The prompt's contexts that the engine uses are zero."""
    with inject.in_ranks(port, contexts_dropped):
        yield


def context_tokens_swapped() -> Any:
    def swap(context: torch.Tensor) -> torch.Tensor:
        return torch.cat([context[:, :1], context[:, 2:3], context[:, 1:2] * 0.5, context[:, 3:]], dim=1)

    return _contexts(swap)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY], source="verl-omni commit b6cd74b4 (#357)", ports=["ltx2"], exact=True)
def a_context_token_is_halved(port: Port) -> Iterator[None]:
    """Of hundreds of tokens of context, the engine has the second one at half its size, and the third before it."""
    with inject.in_ranks(port, context_tokens_swapped):
        yield


def context_cut() -> Any:
    return _contexts(lambda context: context[:, :128])


@fault("objective", "engine", "adapter", catches=[LONG, VELOCITY], source="verl-omni commit b6cd74b4 (#357)", ports=["ltx2"], exact=True)
def the_engine_cuts_contexts_at_128_tokens(port: Port) -> Iterator[None]:
    """The engine attends to the first third of the context."""
    with inject.in_ranks(port, context_cut):
        yield


def clocks_at_another_rate() -> Any:
    return _call(
        lambda arguments: (
            arguments | {"video_coords": arguments["video_coords"] * arguments["video_coords"].new_tensor([24 / 25, 1, 1]).view(1, 3, 1, 1)}
        )
    )


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY, LOOP], source="vllm-omni #4443", ports=["ltx2"])
def the_engine_has_another_frame_rate(port: Port) -> Iterator[None]:
    """The engine's rotary clock of the video runs at 25 frames a second, the actor's at 24."""
    with inject.in_ranks(port, clocks_at_another_rate):
        yield


def streams_isolated() -> Any:
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformerBlock

    def make(original: Any) -> Any:
        return lambda self, *args, **kwargs: original(self, *args, **(kwargs | {"use_v2a_cross_attention": False}))

    return inject.replace(LTX2VideoTransformerBlock, "forward", make)


@fault("objective", "engine", "adapter", catches=[VELOCITY, REPLAY, LOOP], source="own, from modality guidance", ports=["ltx2"])
def the_engines_audio_does_not_see_the_video(port: Port) -> Iterator[None]:
    """The attention from audio to video is off in the engine, as in a pass of modality guidance."""
    with inject.in_ranks(port, streams_isolated):
        yield


def gated_by_the_other_stream() -> Any:
    from loudfail.harness.ports import ltx2_rollout

    def make(original: Any) -> Any:
        return lambda video, audio: {"timestep": video, "audio_timestep": audio}

    return inject.replace(ltx2_rollout, "levels", make)


@fault("objective", "engine", "adapter", catches=[VELOCITY], source="vllm-omni 0.30.0 ltx2_transformer; diffusers 0.40.0", ports=["ltx2"])
def the_engines_streams_are_gated_by_each_others_level(port: Port) -> Iterator[None]:
    """The engine's gates between the streams take the other stream's level, as the engine does by itself."""
    with inject.in_ranks(port, gated_by_the_other_stream):
        yield


def sums_stay_with_their_rank() -> Any:
    from loudfail.harness.ports import ltx2_rollout

    return inject.replace(ltx2_rollout, "share_sums", lambda original: lambda model: None)


@fault(
    "objective",
    "engine",
    "adapter",
    catches=[VELOCITY, EFFECT, REPLAY, LOOP],
    source="vllm-omni 0.30.0, TensorParallelRMSNorm of its LTX-2; found by this gate on a GPU",
    degrees=(2, 4),
    ports=["ltx2"],
    cause="computed over a shard",
)
def the_norms_over_all_heads_drop_the_sum_of_the_ranks(port: Port) -> Iterator[None]:
    """The norm of q and k over the heads of all ranks drops the sum that the all-reduce returns, and normalizes by the rank's own."""
    with inject.in_ranks(port, sums_stay_with_their_rank, rebuild=True):
        yield
