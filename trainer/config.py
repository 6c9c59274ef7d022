"""The configuration of a run: a TOML recipe, checked before anything heavy is loaded.

Every section is a dataclass below; its attributes are the keys, with their defaults. Unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

RECIPES = Path(__file__).parent / "recipes"


class ConfigProblem(ValueError):
    """The recipe cannot be run as it is; the message names the key and what would do."""


@dataclass(frozen=True)
class Model:
    """The port and its actor. ``rank`` and ``alpha`` 0 take the port's own, which is what its certificate is about.

    ``gradient_checkpointing`` computes each block again in the backward pass instead of keeping it: less memory, a third more time, equal results.
    ``compile`` compiles each kind of block once: faster on a GPU, results equal up to rounding. ``attention`` is one of diffusers' backends.
    """

    port: str = "h3"
    scale: str = "tiny"
    weights: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    rank: int = 0
    alpha: float = 0.0
    gradient_checkpointing: bool = False
    compile: bool = False
    attention: str = "native"


@dataclass(frozen=True)
class Parallel:
    """Several processes: whether each holds the whole base (``none``) or its shard of it (``fsdp``), and the seconds that a collective may take."""

    shard: Literal["none", "fsdp"] = "none"
    timeout: int = 600


@dataclass(frozen=True)
class Data:
    """Prompts: ``synthetic`` or a file, see ``trainer/data.py``; condition mode; extent by axis (the port's first if empty)."""

    prompts: str = "synthetic"
    given: tuple[str, ...] = ()
    extent: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """Who samples: ``local`` (the actor with an adapter of its own) or ``vllm_omni`` at tensor-parallel degree ``tp``; model calls of one sample."""

    engine: Literal["local", "vllm_omni"] = "local"
    tp: int = 1
    calls: int = 8


@dataclass(frozen=True)
class Reward:
    """Scorers by name (see ``trainer/rewards/build.py``), what they are given, and one weight for every sub-score."""

    scorers: tuple[str, ...] = ("synthetic",)
    on: Literal["latents", "media"] = "latents"
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """DiffusionNFT, see ``trainer/nft.py``. ``modalities``: weights in the objective, 1 where none is given.

    A step draws ``prompts`` × ``samples`` samples and trains ``epochs`` times on each at ``sigmas`` noise levels. The old policy is refreshed by
    the schedule ``old`` every ``old_every`` steps.
    """

    prompts: int = 6
    samples: int = 8
    sigmas: int = 2
    epochs: int = 1
    spread: Literal["group", "global"] = "group"
    beta: float = 0.5
    clip: float = 5.0
    weighting: Literal["adaptive", "none"] = "adaptive"
    reference: float = 1e-4
    modalities: Mapping[str, float] = field(default_factory=dict)
    old: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999"] = "copy"
    old_every: int = 1


@dataclass(frozen=True)
class Optimizer:
    """AdamW; ``clip`` is the largest gradient norm."""

    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    clip: float = 1.0


@dataclass(frozen=True)
class Validation:
    """Fixed prompts from fixed noise through the rollout, before the first step, every so many steps (0: only first and last), and at the end.

    ``media``: of how many prompts the first sample is written as mp4, picture and JSON; 0 for none.
    """

    every: int = 0
    samples: int = 16
    calls: int = 8
    media: int = 4


@dataclass(frozen=True)
class Checkpoints:
    """Every so many steps (0: only at the end), the last ``keep`` are kept."""

    every: int = 10
    keep: int = 3


@dataclass(frozen=True)
class Monitors:
    """What happens when one fires: ``stop`` or ``warn``; and the steps between two rounds of the dearer ones (replay, reward)."""

    policy: Literal["stop", "warn"] = "stop"
    every: int = 1


@dataclass(frozen=True)
class Logs:
    """TensorBoard files beside ``metrics.jsonl``: ``auto`` writes them where TensorBoard is installed."""

    tensorboard: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True)
class Config:
    """A run. ``micro_batch``: samples of one model call at most; ``threads``: of torch on a CPU, 0 leaves them alone."""

    steps: int = 40
    seed: int = 0
    micro_batch: int = 64
    threads: int = 0
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    validation: Validation = field(default_factory=Validation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    monitors: Monitors = field(default_factory=Monitors)
    logs: Logs = field(default_factory=Logs)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return _plain(asdict(self))


#: Key → smallest value; exclusive where the text says "above".
_AT_LEAST = {
    "steps": 1, "micro_batch": 1, "threads": 0, "model.rank": 0, "model.alpha": 0, "parallel.timeout": 1, "rollout.tp": 1,
    "rollout.calls": 2, "algorithm.prompts": 1,
    "algorithm.samples": 2, "algorithm.sigmas": 1, "algorithm.epochs": 1, "algorithm.reference": 0, "algorithm.old_every": 1,
    "optimizer.weight_decay": 0, "validation.every": 0, "validation.samples": 1, "validation.calls": 2, "validation.media": 0,
    "checkpoints.every": 0, "checkpoints.keep": 1,
    "monitors.every": 1,
}  # fmt: skip
_ABOVE_0 = ("algorithm.beta", "algorithm.clip", "optimizer.learning_rate", "optimizer.clip")


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a built-in recipe or of a ``.toml`` file, with ``section.key=value`` overrides (values as in TOML, or bare text).

    Raises:
        ConfigProblem: no such recipe, bad TOML, an unknown key, or a value of another type or range.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in RECIPES.glob("*.toml"))
        raise ConfigProblem(f"no recipe {name!r}{_nearest(name, known)}; give one of {', '.join(known)}, or the path of a .toml file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigProblem(f"{path}: {error}") from None
    for override in overrides:
        _set(values, override)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Config:
    """The configuration of nested plain values; what is left out has its default.

    Raises:
        ConfigProblem: see `read_recipe`.
    """
    config = _build(Config, values, "")
    for key, least in _AT_LEAST.items():
        if _get(config, key) < least:
            raise ConfigProblem(f"{key} is {_get(config, key)}; it must be at least {least}")
    for key in _ABOVE_0:
        if not _get(config, key) > 0:
            raise ConfigProblem(f"{key} is {_get(config, key)}; it must be above 0")
    if (config.model.rank > 0) != (config.model.alpha > 0):
        raise ConfigProblem("model.rank and model.alpha belong together: give both, or neither for the port's own")
    for key in ("algorithm.modalities", "reward.weights"):
        for name, weight in _get(config, key).items():
            if not weight >= 0:
                raise ConfigProblem(f"{key}.{name} is {weight}; a weight must be at least 0")
    return config


def with_steps(config: Config, steps: int) -> Config:
    """The configuration with another number of steps."""
    return replace(config, steps=steps)


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys whose values differ, dotted."""
    found: list[str] = []
    for key in dict.fromkeys((*a, *b)):
        one, two = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += differing(one, two, f"{prefix}{key}.")
        elif one != two:
            found.append(f"{prefix}{key}")
    return found


def _build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    types_of = get_type_hints(cls)
    known = [one.name for one in fields(cls)]
    if unknown := [key for key in values if key not in known]:
        key = unknown[0]
        raise ConfigProblem(f"unknown key {prefix}{key}{_nearest(key, known, prefix)}; {prefix or 'the top level '}has {', '.join(known)}")
    return cls(**{key: _convert(types_of[key], value, f"{prefix}{key}") for key, value in values.items()})


def _convert(kind: Any, value: Any, key: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigProblem(f"{key} is a section; write [{key}] and its keys below")
        return _build(kind, value, f"{key}.")
    origin = get_origin(kind)
    if origin is Literal:
        if value not in get_args(kind):
            raise ConfigProblem(f"{key} is {value!r}; it must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if origin in (Union, types.UnionType):
        raise TypeError(kind)  # none of our keys is one
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(get_args(kind)[0], one, f"{key}[{i}]") for i, one in enumerate(value))
    if origin is not None and origin is not tuple and isinstance(value, Mapping):
        return {name: _convert(get_args(kind)[1], one, f"{key}.{name}") for name, one in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    wanted = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}.get(
        kind, "a list" if origin is tuple else "a table"
    )
    raise ConfigProblem(f"{key} is {value!r}; it must be {wanted}")


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigProblem(f"--set {override}: want section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigProblem(f"--set {override}: {section} is no section")
    values[last] = value


def _nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
