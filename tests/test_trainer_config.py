"""Recipes are checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loudfail.trainer.config import RECIPES, Config, ConfigProblem, differing, parse, read_recipe
from loudfail.trainer.train import USAGE, main


def test_every_built_in_recipe_is_valid() -> None:
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    assert "h3_tiny" in names
    for name in names:
        assert isinstance(read_recipe(name), Config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1e-3", "unknown key optimizer.learning_rat (did you mean optimizer.learning_rate?)"),
        ("optimiser.learning_rate=1e-3", "unknown key optimiser (did you mean optimizer?)"),
        ("steps=-1", "steps is -1; it must be at least 1"),
        ("steps=2.5", "steps is 2.5; it must be a whole number"),
        ("steps=true", "steps is True; it must be a whole number"),
        ("algorithm.beta=0", "algorithm.beta is 0.0; it must be above 0"),
        ("algorithm.samples=1", "algorithm.samples is 1; it must be at least 2"),
        ("algorithm.old=copied", "must be one of copy, linear_to_0_5, delayed_linear_to_0_999"),
        ("model.rank=8", "belong together"),
        ("reward.weights.synthetic_text_audio=-1", "a weight must be at least 0"),
        ("model=3", "model is a section"),
        ("steps", "want section.key=value"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigProblem) as problem:
        read_recipe("h3_tiny", [override])
    assert message in str(problem.value)


def test_an_unknown_recipe_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigProblem, match=r"did you mean h3_tiny\?"):
        read_recipe("h3_tyni")


def test_values_keep_what_toml_says() -> None:
    config = read_recipe("h3_tiny", ["optimizer.learning_rate=1", "data.given=['first']", "rollout.engine=vllm_omni", "data.extent={frames=7}"])
    assert config.optimizer.learning_rate == 1.0
    assert config.data.given == ("first",)
    assert config.rollout.engine == "vllm_omni"
    assert config.data.extent == {"frames": 7}
    assert differing(read_recipe("h3_tiny").plain(), config.plain()) == [
        "data.given",
        "data.extent.frames",
        "rollout.engine",
        "optimizer.learning_rate",
    ]


def test_what_is_plain_parses_to_the_same() -> None:
    config = read_recipe("h3_tiny")
    assert parse(config.plain()) == config


def test_bad_usage_exits_with_4_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["h3_tiny", "--out", str(tmp_path / "out"), "--set", "steps=0"]) == USAGE
    assert "steps is 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "tp", "given"), [("h3_t2va", 2, ()), ("h3_fl2va", 4, ("first",))])
def test_recipes_of_real_size_shard_the_base_and_share_engines(name: str, tp: int, given: tuple[str, ...]) -> None:
    config = read_recipe(name)
    assert (config.model.rank, config.model.alpha, config.model.dtype) == (64, 128.0, "bfloat16")
    assert (config.parallel.shard, config.rollout.engine, config.rollout.tp) == ("fsdp", "vllm_omni", tp)
    assert (config.rollout.calls, config.validation.calls) == (10, 40)
    assert config.data.given == given
    assert config.algorithm.prompts % 8 == 0  # the processes of a node share them
    assert 8 % tp == 0
