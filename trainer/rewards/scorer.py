"""The interface of reward scorers, and their weighted sum.

A scorer maps media and prompts, paired by position, to named sub-scores: one float64 tensor ``(batch,)`` each, higher is better. It never turns an
error into a number: whatever goes wrong is raised as `ScorerFailed`, because a 0 in place of an error is a legitimate-looking reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from loudfail.harness.media import Media

Scores = dict[str, torch.Tensor]


class ScorerFailed(RuntimeError):
    """A scorer could not give a finite score for every sample; the message names the scorer, the sample where there is one, and the cause."""


@dataclass(frozen=True)
class Provenance:
    """What gave the scores.

    Attributes:
        scorer: name of the scorer.
        weights: ``real``, ``random``, ``tiny random`` or ``synthetic``; anything but ``real`` says nothing about the quality of a sample.
        source: where the weights came from.
        classes: qualified names of the classes that ran.
        licence: what the user must know before using the scores; empty if nothing.
    """

    scorer: str
    weights: Literal["real", "random", "tiny random", "synthetic"]
    source: str
    classes: tuple[str, ...]
    licence: str = ""

    def __str__(self) -> str:
        text = f"{self.scorer}: {self.weights} weights, {self.source}, {', '.join(self.classes)}"
        return f"{text} ({self.licence})" if self.licence else text


@dataclass(frozen=True)
class Arrival:
    """One thing that arrived at a scorer's own model.

    Attributes:
        at: the module or function, such as ``ClapModel.audio_model``.
        name: the argument.
        value: a copy of what arrived; a list of arrays where the callee takes a list.
        rate: sample rate that the callee was told, Hz; None where it is told none.
    """

    at: str
    name: str
    value: Any
    rate: int | None = None


class Scorer:
    """Base class of scorers. Subclasses set `name` and `outputs`, and implement `measure`, `provenance` and `entries`.

    Attributes:
        name: short name, used in messages and reports.
        outputs: sub-score → what it depends on, out of ``audio``, ``video`` and ``prompt``; a change of anything else must leave it as it was.
    """

    name: str = "unnamed"
    outputs: Mapping[str, frozenset[str]] = {}

    def score(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        """Score a batch.

        Args:
            media: one item a sample.
            prompts: the prompt of the sample at the same position.

        Returns:
            Sub-score → ``(len(media),)`` float64 on the CPU, finite, higher is better.

        Raises:
            ValueError: the batch is empty, or the numbers of media and prompts differ.
            ScorerFailed: any sample could not be scored, or a score is not finite.
        """
        if not media or len(media) != len(prompts):
            raise ValueError(f"{self.name}: {len(media)} media and {len(prompts)} prompts; give as many of both, and at least one")
        needs = frozenset().union(*self.outputs.values())
        for i, (item, prompt) in enumerate(zip(media, prompts, strict=True)):
            for part in sorted(needs & {"audio", "video"}):
                if getattr(item, part) is None:
                    raise ScorerFailed(f"{self.name}: sample {i} has no {part}")
            if "prompt" in needs and (not isinstance(prompt, str) or not prompt.strip()):
                raise ScorerFailed(f"{self.name}: the prompt of sample {i} is {prompt!r}; give the text that the sample was generated from")
        try:
            with torch.no_grad():
                result = self.measure(media, prompts)
        except ScorerFailed:
            raise
        except Exception as error:
            raise ScorerFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        return checked(self.name, self.outputs, result, len(media))

    def measure(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        """The scores themselves, from a batch that `score` found well formed; any exception becomes `ScorerFailed`."""
        raise NotImplementedError

    def provenance(self) -> tuple[Provenance, ...]:
        """What gives the scores; one entry for each scorer inside."""
        raise NotImplementedError

    def describe(self) -> str:
        """`provenance` as text, one line a scorer."""
        return "\n".join(map(str, self.provenance()))

    def entries(self) -> Mapping[str, torch.nn.Module]:
        """The modules whose inputs `watch` records, by name."""
        return {}

    @contextmanager
    def watch(self) -> Iterator[list[Arrival]]:
        """Record what arrives at the scorer's own model while inside: a spy at its input, for checks of rate, layout and range."""
        arrivals: list[Arrival] = []
        with ExitStack() as stack:
            self.attach(arrivals, stack)
            yield arrivals

    def attach(self, arrivals: list[Arrival], stack: ExitStack) -> None:
        """Hook the spy of `watch` to the modules of `entries`; subclasses add what is not a module. ``stack`` undoes it."""

        def hook(at: str) -> Any:
            def record(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
                for name, value in [*((str(i), v) for i, v in enumerate(args)), *kwargs.items()]:
                    for key, tensor in value.items() if isinstance(value, Mapping) else [(name, value)]:
                        if isinstance(tensor, torch.Tensor):
                            arrivals.append(Arrival(at, key, tensor.detach().cpu().clone()))

            return record

        for at, module in self.entries().items():
            stack.callback(module.register_forward_pre_hook(hook(at), with_kwargs=True).remove)


def checked(name: str, outputs: Mapping[str, Any] | Sequence[str], result: Mapping[str, torch.Tensor], batch: int) -> Scores:
    """The result of a scorer as ``(batch,)`` float64 on the CPU.

    Raises:
        ScorerFailed: a sub-score is missing, was not declared, has another shape, or is not finite.
    """
    if not isinstance(result, Mapping):
        raise ScorerFailed(f"{name}: gave {type(result).__name__}; want one tensor for each of {sorted(outputs)}")
    missing, surplus = sorted(set(outputs) - set(result)), sorted(set(result) - set(outputs))
    if missing or surplus:
        raise ScorerFailed(f"{name}: sub-scores missing {missing}, not declared {surplus}")
    scores = {}
    for key in outputs:
        value = result[key]
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != (batch,):
            raise ScorerFailed(f"{name}: {key} is {tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}, want ({batch},)")
        value = value.detach().to("cpu", torch.float64)
        bad = (~torch.isfinite(value)).nonzero().flatten().tolist()
        if bad:
            raise ScorerFailed(f"{name}: {key} is {value[bad[0]].item()} for sample {bad[0]} ({len(bad)} of {batch} not finite)")
        scores[key] = value
    return scores


@dataclass
class WeightedSum(Scorer):
    """The total reward: a weighted sum of sub-scores, returned as ``total`` beside every one of them.

    Args:
        scorers: scorers with different sub-scores.
        weights: one finite weight for *every* sub-score; 0 keeps it as a report only. Negative weights are refused: sub-scores are higher-is-better.
        missing: scorers that were wanted and are not here → why; stated by `describe`, never part of the total.

    Raises:
        ValueError: a sub-score without a weight, a weight without a sub-score, a name given twice, or no positive weight.
    """

    scorers: Sequence[Scorer]
    weights: Mapping[str, float]
    name: str = "total"
    missing: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, frozenset[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = [key for scorer in self.scorers for key in scorer.outputs]
        twice = sorted({key for key in names if names.count(key) > 1 or key == "total"})
        if twice:
            raise ValueError(f"sub-scores given twice or reserved: {twice}")
        if set(names) != set(self.weights):
            lost, unknown = sorted(set(names) - set(self.weights)), sorted(set(self.weights) - set(names))
            raise ValueError(f"give one weight for each sub-score; without a weight: {lost}, without a scorer: {unknown}")
        bad = {key: w for key, w in self.weights.items() if not math.isfinite(w) or w < 0}
        if bad or not any(w > 0 for w in self.weights.values()):
            raise ValueError(f"weights must be finite, at least 0, and one of them positive; got {bad or dict(self.weights)}")
        parts = {key: frozenset(on) for scorer in self.scorers for key, on in scorer.outputs.items()}
        self.outputs = {"total": frozenset().union(*(on for key, on in parts.items() if self.weights[key] > 0)), **parts}

    def score(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        """Every sub-score, each scorer called once, and their ``total``; a scorer that fails raises and takes the total with it."""
        scores: Scores = {}
        for scorer in self.scorers:
            scores |= checked(scorer.name, scorer.outputs, scorer.score(media, prompts), len(media))
        return checked(self.name, self.outputs, {"total": self.total(scores), **scores}, len(media))

    def total(self, scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum of already known sub-scores, ``(batch,)`` float64; recomputes a logged total.

        Raises:
            ScorerFailed: a sub-score is missing.
        """
        missing = sorted(set(self.weights) - set(scores))
        if missing:
            raise ScorerFailed(f"{self.name}: sub-scores missing {missing}")
        return torch.stack([self.weights[key] * scores[key].to(torch.float64) for key in sorted(self.weights)]).sum(0)

    def provenance(self) -> tuple[Provenance, ...]:
        return tuple(p for scorer in self.scorers for p in scorer.provenance())

    def describe(self) -> str:
        return "\n".join([super().describe(), *(f"{name}: missing, {why}" for name, why in self.missing.items())])

    def origins(self) -> dict[str, str]:
        """Class that scores → scorer and weights, in words; a missing scorer by its name."""
        here = {name: f"{p.scorer}, {p.weights} weights" for p in self.provenance() for name in p.classes}
        return here | {name: f"missing, {why}" for name, why in self.missing.items()}

    def entries(self) -> Mapping[str, torch.nn.Module]:
        return {f"{scorer.name}/{at}": module for scorer in self.scorers for at, module in scorer.entries().items()}

    def models(self) -> Mapping[str, torch.nn.Module]:
        """`entries`: every module that scores."""
        return self.entries()

    def attach(self, arrivals: list[Arrival], stack: ExitStack) -> None:
        for scorer in self.scorers:
            scorer.attach(arrivals, stack)
