"""LTX-2's own parts: grid, prompt, first frame, media, and a short run of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from loudfail.golden import cases
from loudfail.golden.verify import verify
from loudfail.harness import registry, runner
from loudfail.harness.case import LONG_PROMPT, Case, smallest
from loudfail.harness.compare import relative_error
from loudfail.harness.ports.ltx2 import LTX2
from loudfail.harness.ports.ltx2_released import LTX2Released
from loudfail.harness.ports.ltx2_text import TOKENS
from loudfail.trainer import train
from loudfail.trainer.config import read_recipe


def test_the_grid_depends_on_the_size_of_the_clip_and_ends_at_a_tenth(ltx2: LTX2) -> None:
    small, large = smallest(ltx2), Case(extent={axis: max(sizes) for axis, sizes in ltx2.extents.items()})
    grids = [ltx2.grid(8, case)["video"] for case in (small, large, Case(extent=small.extent, given=("first",)))]
    assert all(grid[0] == 1 and grid[-1] == 0 and float(grid[-2]) == pytest.approx(0.1, abs=1e-6) for grid in grids)
    assert float(grids[1][4]) > float(grids[2][4]) > float(grids[0][4])
    assert torch.equal(ltx2.grid(8)["audio"], grids[0])


def test_upstream_has_no_grid_of_one_call(ltx2: LTX2) -> None:
    """Why `least_calls` is 2."""
    assert ltx2.least_calls == 2
    assert not torch.isfinite(ltx2.grid(1)["video"]).all()


def test_a_prompt_begins_with_its_own_token_and_loses_the_white_space_around_it(ltx2: LTX2) -> None:
    ids = ltx2.tokenize(" the rain\n")
    assert ids == ltx2.tokenize("the rain")
    assert ids[0] == ltx2.tokenizer.bos_token_id
    assert len(ltx2.tokenize(LONG_PROMPT * 4)) == TOKENS


@pytest.mark.parametrize("count", [0, TOKENS + 1])
def test_ids_that_no_context_holds_are_refused(ltx2: LTX2, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} token ids; LTX-2 takes 1 to {TOKENS}"):
        ltx2.encode_prompt((5,) * count)


def test_contexts_are_as_long_whatever_the_prompt_and_differ_between_the_streams(ltx2: LTX2) -> None:
    short, long = (ltx2.condition(ltx2.tokenize(text)).extra for text in ("rain", LONG_PROMPT))
    for extra in (short, long):
        assert extra["video_context"].shape == extra["audio_context"].shape == (TOKENS, ltx2.width)
        assert bool(extra["mask"].all())  # registers fill what the prompt leaves
    assert relative_error(short["video_context"], long["video_context"]) > 0.1
    assert relative_error(short["video_context"], short["audio_context"]) > 0.1


@pytest.mark.parametrize("image", [np.zeros((64, 64, 3), np.float32), np.zeros((64, 64), np.uint8), np.zeros((64, 48, 3), np.uint8), None])
def test_what_is_no_first_frame_is_refused(ltx2: LTX2, image: object) -> None:
    with pytest.raises(ValueError, match="first frame is"):
        ltx2.encode_frame(image)


def test_media_have_a_first_frame_of_their_own_and_the_vocoders_length(ltx2: LTX2) -> None:
    (media,) = ltx2.decode({"video": torch.randn(1, 16, 3, 2, 4), "audio": torch.randn(1, 2, 8, 8)})
    assert media.video.frames.shape == (17, 64, 128, 3)  # 1 + 8 for each latent frame after the first
    assert media.audio.waveform.shape == (2, (8 * 4 - 3) * 240) and media.audio.sample_rate == 24_000


def test_latents_that_are_not_finite_are_not_decoded(ltx2: LTX2) -> None:
    latents = {"video": torch.zeros(1, 16, 1, 2, 2), "audio": torch.full((1, 2, 8, 8), float("nan"))}
    with pytest.raises(ValueError, match="audio latents have NaN"):
        ltx2.decode(latents)


def test_a_degree_that_does_not_divide_the_heads_is_refused_before_a_rank_starts(ltx2: LTX2) -> None:
    with pytest.raises(ValueError, match="degree 3 does not divide the 4 of the attention heads"):
        ltx2.engine(3)


def test_the_classes_that_ran_are_upstreams(ltx2: LTX2) -> None:
    ltx2.engine(1)
    names = ltx2.classes()
    for name in (
        "diffusers.models.transformers.transformer_ltx2.LTX2VideoTransformer3DModel",
        "diffusers.pipelines.ltx2.connectors.LTX2TextConnectors",
        "vllm_omni.diffusion.models.ltx2.ltx2_transformer.LTX2VideoTransformer3DModel",
        "vllm_omni.diffusion.lora.manager.DiffusionLoRAManager",
    ):
        assert name in names


def test_ltx2_computes_what_was_recorded(ltx2: LTX2) -> None:
    results = verify(ltx2, degrees=[1])
    assert [result.name for result in results] == ["ltx2/t2v-float32", "ltx2/i2v-float32"]
    assert {result.outcome for result in results} <= {"same", "drifted"}, [result.message for result in results]


def test_a_feed_forward_without_gate_has_no_halves_to_swap(ltx2: LTX2, h3: object) -> None:
    changes = [set(cases.cases_of(port)[0].changes) for port in (h3, ltx2)]  # type: ignore[arg-type]
    assert changes[0] - changes[1] == {"fc1_halves_swapped"}


def test_the_trainer_trains_it(ltx2: LTX2, tmp_path: Path) -> None:
    values = {"steps": 2, "threads": 0, "algorithm.prompts": 2, "algorithm.samples": 2, "rollout.calls": 4, "validation.samples": 1}
    config = read_recipe("ltx2_tiny", [f"{key}={value}" for key, value in values.items()])
    assert train.train(config, tmp_path, port=ltx2) == train.DONE
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: count["fired"] for name, count in summary["monitors"].items() if count["fired"]} == {}
    assert summary["monitors"]["walked_grid"]["ran"] == summary["monitors"]["velocity_replay"]["ran"] == 2


def test_the_engine_as_released_is_another_model_at_degree_two() -> None:
    """What docs/upgrades/silent-norm.md says. Once upstream shares the sum, this fails, and `share_sums` can go."""
    port = LTX2Released()
    case = smallest(port, prompts=("rain",))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with torch.no_grad(), port.using(None):
        want = port.predict_velocity(latents, sigmas, conditions)
    try:
        errors = {degree: relative_error(port.engine(degree).velocity(latents, sigmas, conditions)["video"], want["video"]) for degree in (1, 2)}
        claim = next(one for one in registry.invariants() if one.id == "conditions::the_rollout_treats_given_frames_as_the_vendor_does")
        given = runner.run(claim, port, 2, explain=True)
    finally:
        port.close()
    assert errors[1] < 1e-6
    assert errors[2] > 0.05
    assert given.diagnosis is not None and given.diagnosis["cause"] == "computed over a shard"
