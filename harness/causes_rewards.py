"""Mistakes of decoding, rewards and advantages: experiments of `loudfail.harness.diagnose`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from loudfail.harness.case import LONG_PROMPT, smallest
from loudfail.harness.compare import relative_error
from loudfail.harness.diagnose import Diagnosis, Mistake, Trial
from loudfail.harness.media import Audio
from loudfail.harness.port import Port, Reward, offers

#: The largest change of a score that counts as none.
STILL = 2e-6


def _content(part: Any) -> torch.Tensor:
    return torch.tensor(part.waveform if isinstance(part, Audio) else part.frames).double()


def _media(port: Port, seed: int, batch: int = 2) -> tuple[dict[str, torch.Tensor], list[Any]]:
    case = smallest(port, seed=seed, prompts=("rain", "a bell rings twice", "wind")[:batch])
    latents = case.normal("clean", port.shapes(case))
    with torch.no_grad():
        return latents, list(port.decode(latents))


def decoding(trial: Trial) -> Diagnosis | None:
    """Decoded parts: their rate and range, and whose latents they come from."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "media")):
        return None
    latents, media = _media(port, 31)
    with torch.no_grad():
        alone = [port.decode({m: x[i : i + 1] for m, x in latents.items()})[0] for i in range(2)]
    for modality in port.modalities:
        parts = [getattr(one, modality) for one in media]
        x = [_content(part) for part in parts]
        rate = float(parts[0].sample_rate if isinstance(parts[0], Audio) else parts[0].fps)
        top = 1.0 if isinstance(parts[0], Audio) else 255.0
        if trial.says("modality missing", all(float(one.std()) == 0 and float(one.abs().max()) < top for one in x)):
            return trial.found("modality missing", f"decoded {modality} is constant: it is filled in, not decoded")
        if modality in port.rates and trial.says("another rate", rate != port.rates[modality]):
            return trial.found("another rate", f"decoded {modality} says {rate:g} a second, the model publishes {port.rates[modality]:g}")
        peak = float(x[0].abs().max())
        for factor in (32768.0, 255.0, 127.5):
            if trial.says("range divided", 1e-6 < peak < top / factor * 1.01 and peak * factor > 0.02 * top):
                return trial.found("range divided", f"decoded {modality} peaks at {peak:.2g}: it was divided by {factor:g} though it was no integer")
        ends = float(((x[0] <= (-top if isinstance(parts[0], Audio) else 0)) | (x[0] >= top)).double().mean())
        if trial.says("range scaled twice", ends > 0.3):
            return trial.found(
                "range scaled twice", f"{ends:.0%} of decoded {modality} lies at the ends of its range: it was scaled twice and clipped"
            )

        def differs(a: torch.Tensor, b: torch.Tensor) -> float:
            return relative_error(a, b) if a.shape == b.shape else math.inf

        own = [_content(getattr(one, modality)) for one in alone]
        if max(differs(x[i], own[i]) for i in range(2)) > 2e-3:
            if trial.fits("one sample's part for the batch", differs(x[1], x[0]), 1e-6):
                return trial.found("one sample's part for the batch", f"every sample carries the {modality} of the first")
            if trial.fits("another sample's part", max(differs(x[i], own[1 - i]) for i in range(2)), 2e-3):
                return trial.found("another sample's part", f"samples carry each other's {modality}")
        with torch.no_grad():
            for other in port.modalities:
                if other != modality:
                    moved = port.decode({m: v.flip(0) if m == other else v for m, v in latents.items()})
                    if trial.says("decoded from another modality", differs(_content(getattr(moved[0], modality)), x[0]) > 2e-3):
                        return trial.found("decoded from another modality", f"the latents of {other} change the decoded {modality}")
    return None


def _largest(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    return max(float((after[name].double() - before[name].double()).abs().max()) for name in before)


def scores(trial: Trial) -> Diagnosis | None:
    """What reaches the scorers: parts and prompts edited or exchanged, samples asked alone, and what arrives at their models."""
    port = trial.port
    if not offers(port, "reward") or not offers(port, "media") or not offers(port, "objective"):
        return None
    reward, (_, media) = port.reward(), _media(port, 32)
    prompts = ["rain", "a bell rings twice"]
    before = reward.score(media, prompts)
    heard = {part for on in reward.outputs.values() for part in on}
    # Pairing: a batch against its samples, then against samples put together one off.
    single = [reward.score([one], [prompt]) for one, prompt in zip(media, prompts, strict=True)]

    def alone(parts: Mapping[str, int], prompt: int = 0) -> dict[str, torch.Tensor]:
        rows = []
        for i in range(2):
            item = media[i]
            for modality, shift in parts.items():
                item = replace(item, **{modality: getattr(media[(i + shift) % 2], modality)})
            rows.append(reward.score([item], [prompts[(i + prompt) % 2]]))
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    together = {name: torch.cat([one[name] for one in single]) for name in single[0]}
    if _largest(before, together) > STILL:
        for modality in port.modalities:
            if trial.says("another sample's part", _largest(before, alone({modality: 1})) <= STILL):
                return trial.found("another sample's part", f"in a batch, each sample is scored with the {modality} of the next one")
        if trial.says("another sample's prompt", _largest(before, alone({}, 1)) <= STILL):
            return trial.found("another sample's prompt", "in a batch, each sample is scored with the prompt of the next one")
        subscores = [name for name in before if name != "total" and _largest({name: before[name]}, {name: together[name]}) > STILL]
        if trial.says("scores depend on the batch", bool(subscores)):
            return trial.found("scores depend on the batch", f"{', '.join(subscores)} of a sample depends on the others of its batch")
        if trial.says("total normalized over the batch", not subscores):
            return trial.found("total normalized over the batch", "the total of a sample depends on the others of its batch, its sub-scores do not")
    # One part at a time: what does not move anything does not arrive.
    swapped = {m: [replace(media[i], **{m: getattr(media[1 - i], m)}) for i in range(2)] for m in port.modalities}
    deaf = [m for m in port.modalities if m in heard and _largest(before, reward.score(swapped[m], prompts)) <= STILL]
    if "prompt" in heard and trial.says("prompt missing", _largest(before, reward.score(media, prompts[::-1])) <= STILL):
        return trial.found("prompt missing", "exchanging the prompts moves no score: every sample is scored with the same one")
    if deaf:
        fresh = reward.score(swapped[deaf[0]], [f"{prompt} {LONG_PROMPT[:20]}" for prompt in prompts])
        other = reward.score(media, [f"{prompt} {LONG_PROMPT[:21]}" for prompt in prompts])
        if len(deaf) == len(heard & set(port.modalities)) and trial.says("scores cached", _largest(fresh, other) > STILL):
            return trial.found("scores cached", "a second sample of a prompt gets the scores of the first")
        if trial.says("modality missing", True):
            return trial.found("modality missing", f"exchanging the {' and '.join(deaf)} of two samples moves no score: it reaches no scorer")
    for name, on in reward.outputs.items():
        if name == "total":
            continue
        for part in (*port.modalities, "prompt"):
            after = reward.score(media, prompts[::-1]) if part == "prompt" else reward.score(swapped[part], prompts)
            moved = _largest({name: before[name]}, {name: after[name]}) > STILL
            if trial.says("sub-scores exchanged" if moved else "modality missing", moved != (part in on)):
                if moved:
                    return trial.found(
                        "sub-scores exchanged", f"{name} moves with {part}, of which it should not depend: it stands under another name"
                    )
                return trial.found(
                    "prompt missing" if part == "prompt" else "modality missing", f"{name} does not move with {part}, on which it depends"
                )
    return _edited(trial, reward, media, prompts, before, heard)


def _edited(
    trial: Trial, reward: Reward, media: Sequence[Any], prompts: Sequence[str], before: Mapping[str, torch.Tensor], heard: set[str]
) -> Diagnosis | None:
    """Edits of a part that leave every score where it was."""
    for modality in (m for m in trial.port.modalities if m in heard):
        parts = [getattr(one, modality) for one in media]

        def still(change: Callable[[Any], Any], modality: str = modality, parts: Sequence[Any] = parts) -> bool:
            items = [replace(one, **{modality: change(part)}) for one, part in zip(media, parts, strict=True)]
            return _largest(before, reward.score(items, list(prompts))) <= STILL

        if isinstance(parts[0], Audio):
            for label, mask in (("left", [[0.0], [1.0]]), ("right", [[1.0], [0.0]])):
                stereo = all(len(part.waveform) == 2 for part in parts)
                if stereo and trial.says("channel dropped", still(lambda p, k=mask: replace(p, waveform=(p.waveform * k).astype("float32")))):  # type: ignore[misc]
                    return trial.found("channel dropped", f"silencing the {label} channel of {modality} moves no score")
            if trial.says("rate ignored", still(lambda p: replace(p, sample_rate=p.sample_rate * 3 // 4))):
                return trial.found("rate ignored", f"another sample rate of {modality} moves no score: a rate is assumed")
            if trial.says("second half not scored", still(_half)):
                return trial.found("second half not scored", f"silencing the second half of {modality} moves no score")
            with reward.watch() as arrivals:
                reward.score([media[0]], [prompts[0]])
            waves = [v for a in arrivals for v in (a.value if isinstance(a.value, list) else []) if getattr(v, "ndim", 0) == 1]
            # The middle, since resampling a constant leaves waves at its ends.
            flat = any(float(v[len(v) // 4 : -(len(v) // 4)].std()) < 0.01 * float(parts[0].waveform.std()) for v in waves if len(v) >= 8)
            if trial.says("modality missing", flat):
                return trial.found("modality missing", f"a scorer's model gets one number for all of {modality}: its time was averaged away")
            if trial.says("waveform in integer range", any(float(abs(v).max()) > 100 for v in waves)):
                return trial.found(
                    "waveform in integer range", f"a scorer's model gets {modality} of up to ±{max(float(abs(v).max()) for v in waves):.0f}"
                )
        else:
            if trial.says("only the first frame", still(lambda p: replace(p, frames=p.frames[:1].repeat(len(p.frames), 0)))):
                return trial.found("only the first frame", f"freezing {modality} at its first frame moves no score")
            if trial.says("picture missing", still(lambda p: replace(p, frames=255 - p.frames))):
                return trial.found("picture missing", f"inverting {modality} moves no score")
    return None


def _half(part: Audio) -> Audio:
    wave = part.waveform.copy()
    wave[:, wave.shape[1] // 2 :] = 0
    return replace(part, waveform=wave)


def total(trial: Trial) -> Diagnosis | None:
    """The total against sums of sub-scores."""
    port = trial.port
    if not offers(port, "reward") or not offers(port, "media") or not offers(port, "objective"):
        return None
    reward, (_, media) = port.reward(), _media(port, 33, 3)
    got = reward.score(media, ["rain", "a bell rings twice", "wind"])
    missing = sorted(set(reward.outputs) - set(got))
    if trial.says("sub-score missing", bool(missing)):
        return trial.found("sub-score missing", f"the result lacks {', '.join(missing)}")
    names = [name for name in reward.weights if name in got]
    parts = {name: reward.weights[name] * got[name].double() for name in names}
    have, want = got["total"].double(), torch.stack(list(parts.values())).sum(0)
    bound = 1e-5 * float(want.abs().max() + 1)
    if float((have - want).abs().max()) <= bound:
        return None

    def off(value: torch.Tensor) -> Callable[[], float]:
        return lambda: float((have - value).abs().max())

    spread = (want - want.mean()) / want.std(correction=0).clamp_min(1e-8)
    mistakes = [
        Mistake("total negated", "the total is the weighted sum with the other sign", off(-want)),
        Mistake(
            "weights ignored", "the total is the sum of sub-scores without their weights", off(torch.stack([got[n].double() for n in names]).sum(0))
        ),
        Mistake("total averaged", "the total is the mean of the weighted sub-scores, not their sum", off(want / len(names))),
        Mistake("total normalized over the batch", "the total is normalized over the batch", off(spread)),
    ]
    for size in range(1, len(names) + 1):
        for lost in itertools.combinations(names, size):
            text = f"the total lacks {', '.join(lost)}" if size < len(names) else "the total is 0: no sub-score is in it"
            mistakes.append(Mistake("sub-scores missing from the total", text, off(want - torch.stack([parts[n] for n in lost]).sum(0))))
    if (found := trial.first(mistakes, bound)) is not None:
        return found
    a, b = have - have.mean(), want - want.mean()
    slope = float((a * b).sum() / b.square().sum())
    if len(have) > 2 and float(a.abs().max()) > bound and trial.fits("total normalized over the batch", float((a - slope * b).abs().max()), bound):
        text = f"the total is {slope:.3g} times the weighted sum and shifted to a mean of {float(have.mean()):.3g}"
        return trial.found("total normalized over the batch", text)
    return None


# -- advantages -------------------------------------------------------------------------------------------------------------------------------
def _advantages(
    values: torch.Tensor,
    draws: Sequence[object],
    divide: str = "population",
    over: Sequence[object] | None = None,
    centre: Sequence[object] | None = None,
) -> torch.Tensor:
    """Deviations from the mean within ``centre`` (the draws) over the deviation within ``over`` (the draws)."""
    centre, over = centre or draws, over or draws

    def groups(keys: Sequence[object]) -> list[list[int]]:
        return [[j for j, key in enumerate(keys) if key == mine] for mine in keys]

    centred = torch.stack([values[i] - values[mates].mean() for i, mates in enumerate(groups(centre))])
    if divide == "none":
        return centred
    spread = torch.stack([centred[mates].std(correction=1 if divide == "unbiased" else 0) for mates in groups(over)])
    return centred / spread


def advantages(trial: Trial) -> Diagnosis | None:
    """The trainer's advantages and optimality probabilities against known variants of the formulas (arXiv 2509.16117)."""
    port = trial.port
    if not offers(port, "update"):
        return None
    update = port.update()
    generator = torch.Generator().manual_seed(34)
    draws = [9, 4, 9, 4, 9, 7, 4, 7, 7]
    values = 3 * torch.randn(len(draws), generator=generator, dtype=torch.float64) + torch.tensor([float(d) for d in draws], dtype=torch.float64)
    prompts = [f"prompt {draw}" for draw in draws]
    everything, blocks = [0] * len(draws), {k: [min(i // k, len(draws) // k - 1) for i in range(len(draws))] for k in (2, 3, 4)}
    order = sorted(range(len(draws)), key=lambda i: draws[i])

    def ask(draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        return update.advantages(values, list(draws), list(prompts), spread).detach().double().cpu()

    want, got = _advantages(values, draws), ask(draws, prompts, "group")

    def off(value: torch.Tensor) -> Callable[[], float]:
        return lambda: relative_error(got, value, want)

    if off(want)() > 5e-4:
        found = trial.first(
            [
                Mistake("advantages negated", "higher rewards have lower advantages", off(-want)),
                Mistake("baseline of the batch", "all samples are compared with one mean, whatever their draw", off(_advantages(values, everything))),
                Mistake(
                    "baseline of the batch",
                    "the baseline is the batch's mean, the spread the group's",
                    off(_advantages(values, draws, centre=everything)),
                ),
                *(
                    Mistake("groups by position", f"groups are {k} neighbours, whatever the draws say", off(_advantages(values, blocks[k])))
                    for k in blocks
                ),
                Mistake("advantages in another order", "advantages come back sorted by draw", off(want[order])),
                *(
                    Mistake("advantages in another order", f"each sample has the advantage of the one {k} before it", off(want.roll(k)))
                    for k in range(1, len(draws))
                ),
                Mistake(
                    "advantages in another order", "the right advantages, of other samples", lambda: relative_error(got.sort()[0], want.sort()[0])
                ),
                Mistake("spread left out", "deviations are divided by nothing", off(_advantages(values, draws, "none"))),
                Mistake("spread unbiased", "divided by the standard deviation with K − 1", off(_advantages(values, draws, "unbiased"))),
                Mistake("spread of the batch", "divided by the batch's spread, not the group's", off(_advantages(values, draws, over=everything))),
            ],
            5e-4,
        )
        if found:
            return found
    one_text = ask(draws, ["rain"] * len(draws), "group")
    merged = relative_error(one_text, _advantages(values, everything), want)
    if relative_error(one_text, want) > 5e-4 and trial.says("groups by text", merged <= 5e-4):
        return trial.found("groups by text", "draws of one text are one group")
    try:
        whole = ask(draws, prompts, "global")
    except Exception:
        whole = _advantages(values, draws, over=everything)
    if trial.says("spread of the group", relative_error(whole, want) <= 5e-4):
        return trial.found("spread of the group", "a global spread is asked for, and each group is divided by its own")
    return _optimality(trial, update.optimality)


def _optimality(trial: Trial, ask: Callable[[torch.Tensor, float], torch.Tensor]) -> Diagnosis | None:
    a = torch.tensor([-7.0, -2.5, -1.2, -0.4, 0.0, 0.3, 0.9, 1.7, 3.0, 8.0], dtype=torch.float64)
    clips = (0.5, 2.0, 4.0)
    got = {z: ask(a, z).detach().double().cpu() for z in clips}

    def off(formula: Callable[[float], torch.Tensor]) -> Callable[[], float]:
        return lambda: max(float((got[z] - formula(z)).abs().max()) for z in clips)

    if off(lambda z: 0.5 + 0.5 * (a / z).clamp(-1, 1))() <= 1e-6:
        return None
    return trial.first(
        [
            Mistake("optimality reversed", "r is the probability of being bad, 1 − r", off(lambda z: 0.5 - 0.5 * (a / z).clamp(-1, 1))),
            Mistake("optimality is the advantage", "r is the advantage cut to [0, 1]", off(lambda z: (a / z).clamp(0, 1))),
            Mistake("optimality is the advantage", "r is the advantage cut to [0, 1]", off(lambda z: a.clamp(0, 1))),
            Mistake("advantage not clipped", "r leaves [0, 1]: nothing is clipped", off(lambda z: 0.5 + 0.5 * a / z)),
            Mistake("advantage clipped above only", "bad outliers have a negative r", off(lambda z: 0.5 + 0.5 * (a / z).clamp(max=1))),
            Mistake("advantage clipped below only", "good outliers have an r above 1", off(lambda z: 0.5 + 0.5 * (a / z).clamp(min=-1))),
            Mistake(
                "clipped before it is divided", "the advantage is clipped to ±1 and then divided by Z", off(lambda z: 0.5 + 0.5 * a.clamp(-1, 1) / z)
            ),
            *(Mistake("clip ignored", f"Z is always {n}", off(lambda z, n=n: 0.5 + 0.5 * (a / n).clamp(-1, 1))) for n in (1, 2, 3, 5, 10)),  # type: ignore[misc]
        ],
        1e-6,
    )
