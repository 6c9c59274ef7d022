"""Faults of the sigma grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault

VENDOR, ROLLOUT, ENDS = (
    "schedule::the_grid_is_the_vendors",
    "schedule::the_grid_is_the_rollouts",
    "schedule::the_grid_descends_from_pure_noise_to_clean",
)
VISITED, FORMULA = "schedule::the_vendors_loop_calls_the_model_once_at_each_level_but_the_last", "schedule::the_grid_is_one_shift_of_an_even_grid"
WALKED, MEMORY = "schedule::the_rollout_steps_along_the_grid", "schedule::the_grid_does_not_remember_earlier_grids"
EULER = "conventions::an_euler_loop_in_our_convention_ends_where_the_vendors_does"


def no_shift(port: Port) -> str:
    return "" if port.shift else "its schedule is not one shift of an even grid"


def one_grid(port: Port) -> str:
    grids = list(port.grid(max(4, port.least_calls)).values())
    return "its modalities walk one grid" if all(torch.equal(grid, grids[0]) for grid in grids) else ""


@fault(
    "objective",
    "vendor",
    "engine",
    catches=[VENDOR, ROLLOUT, ENDS, VISITED, EULER],
    source="verl-project/verl-omni#280, PR #279",
    cause="grid with a point less",
)
def the_grid_has_one_point_less(port: Port) -> Iterator[None]:
    """The trainer replays a table that is one point shorter than the rollout's, for an adjustment that an older engine needed."""
    with inject.replace(port, "grid", lambda original: lambda calls, case=None: original(max(calls - 1, port.least_calls), case)):
        yield


@fault(
    "objective",
    "vendor",
    "engine",
    catches=[VENDOR, ROLLOUT, ENDS, VISITED],
    source="huggingface/diffusers#13730, commit 32ecbe3836",
    cause="terminal level doubled",
)
def the_terminal_level_is_appended_twice(port: Port) -> Iterator[None]:
    """The terminal 0 is appended to a grid that holds it already: one model call too many, at sigma 0."""

    def make(original: Any) -> Any:
        return lambda calls, case=None: {m: torch.cat([s, s.new_zeros(1)]) for m, s in original(calls, case).items()}

    with inject.replace(port, "grid", make):
        yield


@fault(
    "objective",
    "vendor",
    "engine",
    catches=[VENDOR, ROLLOUT, VISITED, FORMULA, EULER],
    source="huggingface/diffusers#13243",
    unless=no_shift,
    cause="shift applied twice",
)
def the_shift_is_applied_twice(port: Port) -> Iterator[None]:
    """A grid that is shifted already is shifted again."""

    def make(original: Any) -> Any:
        return lambda calls, case=None: {m: port.shift[m] * s / (1 + (port.shift[m] - 1) * s) for m, s in original(calls, case).items()}

    with inject.replace(port, "grid", make):
        yield


@fault("objective", "engine", catches=[ROLLOUT, FORMULA, WALKED], source="huggingface/diffusers#13243", ports=("h3",), cause="shift applied twice")
def the_scheduler_class_shifts_twice(port: Port) -> Iterator[None]:
    """The upstream scheduler class itself shifts its grid twice, for trainer and vendor alike; the rollout's does not."""
    from diffusers import MiniMaxH3Scheduler

    def make(original: Any) -> Any:
        def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.sigmas = self.shift * self.sigmas / (1 + (self.shift - 1) * self.sigmas)
            self.timesteps = 1 - self.sigmas[:-1]

        return set_timesteps

    with inject.replace(MiniMaxH3Scheduler, "set_timesteps", make):
        yield


@fault(
    "objective",
    "vendor",
    "engine",
    catches=[VENDOR, ROLLOUT, VISITED, FORMULA],
    source="huggingface/diffusers#13243",
    unless=no_shift,
    cause="grid of flow-match Euler",
)
def the_grid_is_that_of_flow_match_euler(port: Port) -> Iterator[None]:
    """The grid comes from the usual flow-match scheduler, whose end points are shifted once when it is built and again with the grid."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def make(original: Any) -> Any:
        def grid(calls: int, case: Any = None) -> dict[str, torch.Tensor]:
            result = {}
            for modality, shift in port.shift.items():
                scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
                scheduler.set_timesteps(calls)
                result[modality] = scheduler.sigmas.clone()
            return result

        return grid

    with inject.replace(port, "grid", make):
        yield


@fault(
    "objective",
    "vendor",
    "engine",
    catches=[VENDOR, ROLLOUT, VISITED, EULER],
    source="ostris/ai-toolkit PR #720",
    unless=one_grid,
    cause="one modality at another's level",
)
def both_modalities_walk_the_videos_schedule(port: Port) -> Iterator[None]:
    """One sigma serves both modalities although the sampler walks two schedules; noise level and label agree, so that no loss shows it."""

    def make(original: Any) -> Any:
        return lambda calls, case=None: dict.fromkeys(port.modalities, original(calls, case)[port.modalities[0]])

    with inject.replace(port, "grid", make):
        yield


@fault("objective", catches=[ENDS, VENDOR], cause="grid starts below pure noise")
def the_grid_starts_below_pure_noise(port: Port) -> Iterator[None]:
    """The first level is 0.999 although the initial latents are pure noise."""

    def make(original: Any) -> Any:
        return lambda calls, case=None: {m: s.clamp(max=0.999) for m, s in original(calls, case).items()}

    with inject.replace(port, "grid", make):
        yield


@fault("objective", "vendor", catches=[MEMORY, VENDOR], source="Tencent-Hunyuan/UniRL#333, PR #336", cause="grid of another request")
def a_replay_reads_the_schedule_of_the_last_sampling(port: Port) -> Iterator[None]:
    """The grid is set up once, by whoever asks first, and later numbers of calls get that one."""

    def make(original: Any) -> Any:
        first: dict[str, Any] = {}

        def grid(calls: int, case: Any = None) -> dict[str, torch.Tensor]:
            first.setdefault("grid", original(calls, case))
            return {m: s.clone() for m, s in first["grid"].items()}

        return grid

    with inject.replace(port, "grid", make):
        yield


@fault("objective", "vendor", catches=[MEMORY], cause="grid shared with its callers")
def the_grid_is_shared_with_its_callers(port: Port) -> Iterator[None]:
    """The grid is cached by its number of calls and handed out without a copy, so that one caller's arithmetic changes it for all."""

    def make(original: Any) -> Any:
        cache: dict[int, dict[str, torch.Tensor]] = {}

        def grid(calls: int, case: Any = None) -> dict[str, torch.Tensor]:
            if calls not in cache:
                cache[calls] = original(calls, case)
            return cache[calls]

        return grid

    with inject.replace(port, "grid", make):
        yield


def _another_shift() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.minimax_h3 import time_request

    def make(original: Any) -> Any:
        return lambda *, num_steps=50, shift_scale=6.0, base_schedule=None: original(
            num_steps=num_steps, shift_scale=6.0, base_schedule=base_schedule
        )

    return inject.replace(time_request, "minimax_h3_time_shift_sigmas", make)


@fault(
    "objective", "engine", catches=[ROLLOUT, WALKED], source="LBH-123-AI/Comfyui_Minimax_h3_latent_Upscaler#8", ports=("h3",), cause="another shift"
)
def the_rollout_walks_its_default_shift(port: Port) -> Iterator[None]:
    """The rollout builds its grid with its default shift of 6 instead of the one configured for the modality."""
    with inject.in_ranks(port, _another_shift):
        yield


def _one_call_more() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.minimax_h3 import denoise_loop

    def make(original: Any) -> Any:
        def loop(**arguments: Any) -> Any:
            for name in ("sigmas_video", "sigmas_audio"):
                levels = arguments[name]
                arguments[name] = [levels[0], (levels[0] + levels[1]) / 2, *levels[1:]]
            return original(**arguments)

        return loop

    return inject.replace(denoise_loop, "minimax_h3_denoise_loop", make)


@fault("objective", "engine", catches=[WALKED], source="verl-project/verl-omni#280", ports=("h3",), cause="a model call too few or too many")
def the_rollouts_loop_walks_another_grid_than_it_reports(port: Port) -> Iterator[None]:
    """The rollout's loop inserts a level after the first, while the grid that it reports stays right."""
    with inject.in_ranks(port, _one_call_more):
        yield


@fault("objective", "engine", catches=[ROLLOUT, WALKED], source="huggingface/diffusers#13243", ports=("ltx2",))
def the_flow_match_class_shifts_twice(port: Port) -> Iterator[None]:
    """The upstream flow-match scheduler shifts its levels twice, for trainer and vendor alike; the rollout's ranks have the class as it was."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def make(original: Any) -> Any:
        return lambda self, mu, sigma, t: original(self, mu, sigma, original(self, mu, sigma, t))

    with inject.replace(FlowMatchEulerDiscreteScheduler, "time_shift", make):
        yield


def _own_levels() -> AbstractContextManager[Any]:
    from loudfail.harness.ports.ltx2_rollout import LTX2Fused

    return inject.replace(LTX2Fused, "request_sigmas", lambda original: lambda self, calls, tokens: None)


@fault(
    "objective",
    "engine",
    catches=[ROLLOUT],
    source="vllm-omni 0.30.0 _official_ltx_sigmas; diffusers 0.40.0 calculate_shift",
    ports=("ltx2",),
)
def the_rollout_walks_the_schedule_of_the_largest_clip(port: Port) -> Iterator[None]:
    """Requests carry no levels, and the rollout walks its own: shifted as for the largest clip, whatever the clip, where the vendor's are not."""
    with inject.in_ranks(port, _own_levels):
        yield


def _one_level_more() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.ltx2 import ltx2_denoise

    def make(original: Any) -> Any:
        def run(pipeline: Any, req: Any, inputs: Any, *, sigmas: Any, **kwargs: Any) -> Any:
            return original(pipeline, req, inputs, sigmas=[sigmas[0], (sigmas[0] + sigmas[1]) / 2, *sigmas[1:]], **kwargs)

        return run

    return inject.replace(ltx2_denoise.LTXPhaseExecutor, "run", make)


@fault("objective", "engine", catches=[WALKED], source="verl-project/verl-omni#280", ports=("ltx2",), cause="a model call too few or too many")
def the_rollouts_loop_inserts_a_level(port: Port) -> Iterator[None]:
    """The rollout's loop inserts a level after the first, while the grid that it reports stays right."""
    with inject.in_ranks(port, _one_level_more):
        yield
