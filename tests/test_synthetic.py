"""The synthetic world, its reward, and the checkpoint that was trained on it."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from loudfail.golden import lessons, train_tiny
from loudfail.harness import registry, synthetic
from loudfail.harness.actor import FusedPort
from loudfail.harness.ports.h3 import H3
from loudfail.harness.violation import Unavailable

SHAPES = {"video": (24, 2, 4, 4), "audio": (2, 32, 8)}
CLASSES = [index % 6 for index in range(1200)]
#: What the world's own probabilities say: audio of the own class gives 1, any other 0.5; a given other class is heard with a fifth of the rest.
OWN = sum(synthetic.FIDELITY) / 6
CLAP, CLAP_OF_ANOTHER = 0.5 + OWN / 2, 0.5 + (1 - OWN) / 10


@pytest.fixture(scope="module")
def data() -> dict[str, torch.Tensor]:
    return synthetic.sample(SHAPES, CLASSES, seed=5)


@pytest.fixture(scope="module", params=sorted(lessons.LESSONS))
def lesson(request: pytest.FixtureRequest) -> lessons.Lesson:
    return lessons.find(request.param)


@pytest.fixture(scope="module")
def port(lesson: lessons.Lesson) -> FusedPort:
    return lesson.port


def mean_scores(latents: dict[str, torch.Tensor], classes: list[int] = CLASSES) -> dict[str, float]:
    return {name: value.mean().item() for name, value in synthetic.score(latents, classes).items()}


def test_the_world_is_a_function_of_its_seed(data: dict[str, torch.Tensor]) -> None:
    again, other = synthetic.sample(SHAPES, CLASSES, seed=5), synthetic.sample(SHAPES, CLASSES, seed=6)
    for modality, shape in SHAPES.items():
        assert data[modality].shape == (1200, *shape)
        assert data[modality].dtype == torch.float32
        assert torch.equal(data[modality], again[modality])
        assert not torch.equal(data[modality], other[modality])


@pytest.mark.parametrize("width", [8, 32, 64])
def test_templates_are_orthogonal_of_norm_sqrt_width(width: int) -> None:
    rows = synthetic.templates(width)
    assert torch.equal(rows @ rows.T, width * torch.eye(6, dtype=torch.float64))


def test_the_reward_hears_the_audio(data: dict[str, torch.Tensor]) -> None:
    true = mean_scores(data)
    silent = mean_scores(data | {"audio": torch.zeros_like(data["audio"])})
    assert silent["clap"] == 0.5
    assert silent["av"] < true["av"] - 0.4
    swapped = mean_scores(data | {"audio": data["audio"].roll(1, 0)})
    assert swapped["clap"] == pytest.approx(CLAP_OF_ANOTHER, abs=0.03)
    assert swapped["av"] < true["av"] - 0.1


def test_the_reward_reads_the_prompt(data: dict[str, torch.Tensor]) -> None:
    true, permuted = mean_scores(data), mean_scores(data, [(kind + 1) % 6 for kind in CLASSES])
    assert true["clap"] == pytest.approx(CLAP, abs=0.03)
    assert permuted["clap"] == pytest.approx(CLAP_OF_ANOTHER, abs=0.03)
    assert permuted["av"] == true["av"]


def test_the_reward_sees_the_video(data: dict[str, torch.Tensor]) -> None:
    true, flipped = mean_scores(data), mean_scores(data | {"video": -data["video"]})
    assert flipped["av"] < true["av"] - 0.1
    assert flipped["clap"] == true["clap"]


def test_a_perfect_sample_scores_one_and_the_reward_is_the_mean_of_the_sub_scores() -> None:
    audio = (1.3 * synthetic.templates(32)[2]).view(1, 1, 32, 1).expand(1, 2, 32, 8)
    scores = synthetic.score({"video": torch.full((1, 24, 2, 4, 4), 0.3), "audio": audio}, [2])
    assert scores["clap"].dtype == scores["av"].dtype == torch.float64
    assert scores["clap"].item() == pytest.approx(1, abs=1e-12)
    assert scores["av"].item() == pytest.approx(1, abs=1e-6)
    assert synthetic.reward({"clap": torch.tensor([0.2]), "av": torch.tensor([0.6])}).item() == pytest.approx(0.4)


def test_prompts_differ_in_difficulty(data: dict[str, torch.Tensor]) -> None:
    clap = synthetic.score(data, CLASSES)["clap"].view(-1, 6).mean(0)
    assert clap[5] - clap[0] > 0.1


@pytest.mark.parametrize(
    ("shapes", "classes", "message"),
    [
        ({"video": (24, 2, 4, 4)}, [0], "video and audio"),
        ({"video": (2, 4, 4), "audio": (2, 32, 8)}, [0], "want video"),
        ({"video": (24, 2, 4, 4), "audio": (2, 30, 8)}, [0], "multiple of 8"),
        (SHAPES, [6], "class 6"),
        (SHAPES, [-1], "class -1"),
    ],
)
def test_bad_input_is_named(shapes: dict[str, tuple[int, ...]], classes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthetic.sample(shapes, classes, seed=0)


def test_the_score_refuses_another_number_of_prompts(data: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="3 prompts"):
        synthetic.score(data, [0, 1, 2])


def test_a_model_may_have_its_audios_time_elsewhere(data: dict[str, torch.Tensor]) -> None:
    shapes = {"video": SHAPES["video"], "audio": (2, 8, 32)}
    turned = synthetic.sample(shapes, CLASSES, seed=5, audio_time=1)
    assert torch.equal(turned["audio"], data["audio"].transpose(-1, -2))
    assert torch.equal(synthetic.score(turned, CLASSES, audio_time=1)["clap"], synthetic.score(data, CLASSES)["clap"])


def test_the_checkpoint_is_the_one_its_record_describes(port: FusedPort) -> None:
    content, record = port.checkpoint.read_bytes(), json.loads(port.checkpoint.with_suffix(".json").read_text(encoding="utf-8"))
    assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert len(content) == record["bytes"] <= 2 * 2**20
    assert record["architecture"] == port.scales["tiny"]


def test_the_checkpoint_has_learned_the_world(port: FusedPort) -> None:
    """The record against itself, and against the world as it is now: a world that was changed since needs a new checkpoint."""
    quality = json.loads(port.checkpoint.with_suffix(".json").read_text(encoding="utf-8"))["quality"]
    classes, axis = [index % 6 for index in range(quality["samples"])], port.time_axis["audio"]
    now = synthetic.score(synthetic.sample(train_tiny.shapes(port), classes, seed=1, audio_time=axis), classes, axis)
    rewards = {name: scores["reward"] for name, scores in quality["reward"].items()}
    assert rewards["data"] == pytest.approx(synthetic.reward(now).mean().item(), rel=1e-4)
    assert abs(rewards["samples of 16 calls"] - rewards["data"]) < 0.25 * (rewards["data"] - rewards["noise"])


def test_the_actor_predicts_the_velocity_of_the_world(lesson: lessons.Lesson) -> None:
    """The checkpoint as the actor loads it, through the inputs and the convention that it was trained with."""
    batch = lessons.draw(lesson, train_tiny.extent_of(lesson.port), 3, 16, 77, None)
    batch.sigmas = {"video": 0.6, "audio": 0.45}
    errors = {}
    with torch.no_grad(), lesson.port.using(None):
        for name, told, sign in (("right", None, 1.0), ("flipped", {"video": 0.4, "audio": 0.55}, 1.0), ("negated", None, -1.0)):
            errors[name] = train_tiny.velocity_errors(lesson, lesson.port.actor, batch, torch.Generator().manual_seed(1), told, sign)
    for modality, right in errors["right"].items():
        assert right < 0.5, (modality, errors)  # predicting nothing gives more than 1
        assert errors["negated"][modality] > 4 * right, (modality, errors)
        assert errors["flipped"][modality] > right, (modality, errors)


def test_the_trained_batch_is_of_the_world(port: FusedPort) -> None:
    latents, conditions = port.trained_batch(seed=9, count=12)
    again, _ = port.trained_batch(seed=9, count=12)
    prompts = {port.tokenize(prompt): index for index, prompt in enumerate(synthetic.PROMPTS)}
    classes = [prompts[condition.prompt_ids] for condition in conditions]
    assert set(classes) == set(range(6))
    assert all(not condition.given for condition in conditions)
    assert all(torch.equal(latents[m], again[m]) for m in latents)
    assert {m: tuple(value.shape) for m, value in latents.items()} == {m: (12, *shape) for m, shape in train_tiny.shapes(port).items()}
    assert synthetic.reward(synthetic.score(latents, classes, port.time_axis["audio"])).mean() > 0.6


def test_every_port_of_ours_has_a_lesson() -> None:
    ours = {name for name, target in registry.ports().items() if target.startswith("loudfail.")}
    assert ours == set(lessons.LESSONS)
    with pytest.raises(ValueError, match="no lesson for 'x'; there are h3, ltx2"):
        lessons.find("x")


def test_only_the_built_in_tiny_checkpoint_has_a_world() -> None:
    with pytest.raises(Unavailable, match="tiny"):
        H3(scale="wide").trained_batch(0, 2)
    with pytest.raises(Unavailable, match="tiny"):
        H3(weights="somewhere").trained_batch(0, 2)


def test_rows_and_back_is_the_identity(lesson: lessons.Lesson) -> None:
    batch = lessons.draw(lesson, train_tiny.extent_of(lesson.port), 0, 3, 5, None)
    back = lessons.latents_of(lesson, lesson.rows(batch.latents), train_tiny.shapes(lesson.port))
    assert all(torch.equal(back[modality], value) for modality, value in batch.latents.items())


def test_training_again_gives_the_same_bits() -> None:
    lesson, settings = lessons.find("h3"), train_tiny.Settings(steps=20, batch=2)
    threads = torch.get_num_threads()
    first, losses = train_tiny.train(lesson, settings)
    torch.rand(3)  # the state of the global generator must not matter
    second, again = train_tiny.train(lesson, settings)
    assert losses == again
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
