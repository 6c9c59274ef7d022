"""Mistakes of weights, LoRA and tensor parallelism: experiments of `loudfail.harness.diagnose`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from loudfail.harness.case import smallest
from loudfail.harness.causes_velocity import worst
from loudfail.harness.compare import relative_error
from loudfail.harness.diagnose import Diagnosis, Mistake, Trial
from loudfail.harness.port import AdapterConfig, Port, offers, probe, random_adapter

State = Mapping[str, torch.Tensor]
Rows = Callable[[torch.Tensor], torch.Tensor]
#: Seeded inputs of one layer; versions of hand-overs made here are above those of anybody else.
COUNT, SEED, VERSION = 64, 19, 1_000_000
#: Ranks and scales other than the configured ones, for what shows at some of them only.
CONFIGS = ((128, 64.0), (32, 5.0), (100, 250.0), (16, 64.0), (1, 3.0))


def _list(names: Sequence[str]) -> str:
    """The names, or what those have in common whose number is too large to be listed."""
    patterns = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    shown = list(names) if len(names) <= 3 else list(patterns)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _projections(names: Sequence[str]) -> list[str]:
    """The projections of tensors, by the names of which they begin."""
    return list(dict.fromkeys(name.split(".lora_")[0] for name in names))


_versions = VERSION


def _next() -> int:
    global _versions
    _versions += 1
    return _versions


# -- what a layer of the rollout adds ---------------------------------------------------------------------------------------------------------------
@dataclass
class Layers:
    """An adapter that was handed over, and what the layers then add."""

    state: State
    config: AdapterConfig
    got: dict[str, torch.Tensor]
    projections: Mapping[str, tuple[int, int]]

    def factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state[f"{name}.lora_A.weight"].double(), self.state[f"{name}.lora_B.weight"].double()

    def inputs(self, name: str) -> torch.Tensor:
        return probe(self.projections[name][1], COUNT, SEED).double().T

    def want(self, name: str) -> torch.Tensor:
        a, b = self.factors(name)
        return self.config.scale * (b @ (a @ self.inputs(name)))

    def error(self, want: Callable[[str], torch.Tensor], names: Sequence[str]) -> float:
        """The worst relative error over these projections if that is what they should add."""
        return max((relative_error(self.got[name], want(name), self.want(name)) for name in names), default=math.inf)


def _hand_over(trial: Trial, config: AdapterConfig, seed: int, version: int | None = None) -> Layers:
    port, engine = trial.port, trial.port.engine(trial.degree)
    state = random_adapter(port, config, seed)
    sent = {name: value.clone() for name, value in state.items()}
    engine.set_adapter(sent, config, version or _next())
    return Layers(state, config, engine.delta_response(COUNT, SEED), port.projections())


def handed(trial: Trial) -> Diagnosis | None:
    """What each layer of the rollout adds against alpha / r · B A, for one adapter and for a second one."""
    return _response(trial, everything=False)


def response(trial: Trial) -> Diagnosis | None:
    """The same, also at other ranks, under a known version, after base reloads and after removal."""
    return _response(trial, everything=True)


def _response(trial: Trial, everything: bool) -> Diagnosis | None:
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "engine")):
        return None
    engine = port.engine(trial.degree)
    try:
        first, second = _hand_over(trial, port.adapter, 501), _hand_over(trial, port.adapter, 502)
        if found := _stale(trial, first, second):
            return found
        engine.remove_adapter()
        first = _hand_over(trial, port.adapter, 501)
        if found := _layers(trial, first):
            return found
        second = _hand_over(trial, port.adapter, 502)
        if found := _second(trial, first, second):
            return found
        if not everything:
            return None
        if found := _manners(trial):
            return found
        for rank, alpha in CONFIGS:
            config = AdapterConfig(rank, alpha, port.adapter.targets)
            here = _hand_over(trial, config, 503)
            if found := _layers(trial, here, f" at rank {rank}"):
                return found
            if rank > 24:  # a smaller one after it, whose buffers may keep the larger one's rows
                less = _hand_over(trial, AdapterConfig(8, 16.0, port.adapter.targets), 504)
                if found := _second(trial, here, less):
                    return found
    finally:
        with suppress(Exception):
            engine.remove_adapter()
    return None


def _layers(trial: Trial, here: Layers, when: str = "") -> Diagnosis | None:
    names = list(here.projections)
    lacking = [name for name in names if name not in here.got]
    dumb = [n for n in names if n in here.got and float(here.got[n].norm()) <= 1e-9 * float(here.want(n).norm())]
    if lacking or dumb:
        trial.says("adapter missing", True)
        if len(lacking) + len(dumb) == len(names):
            return trial.found("adapter missing", f"no layer of the rollout adds anything{when}: the adapter is bound to nothing")
        what = "have no LoRA layer" if lacking else "add nothing"
        where = f"{len(lacking or dumb)} of {len(names)} projections {what} in the rollout{when}: {_list(lacking or dumb)}"
        return trial.found("projections missing", where)
    bound = 5e-6 if trial.port.dtype == "float32" else trial.bound
    wrong = [name for name in names if relative_error(here.got[name], here.want(name)) > bound]
    if not wrong:
        return None
    found = trial.first(_of_factors(trial, here, wrong, when), bound, here.error(here.want, wrong))
    if found is not None:
        return found
    ratios = [float((here.got[n] * here.want(n)).sum() / here.want(n).square().sum()) for n in wrong]
    k = ratios[0]
    if trial.fits("LoRA scaled", here.error(lambda n: k * here.want(n), wrong), bound):
        return trial.found("LoRA scaled", f"what {_list(wrong)} adds in the rollout{when} is {k:.4g} times alpha / r · B A")
    return None


def _of_factors(trial: Trial, here: Layers, wrong: Sequence[str], when: str) -> Iterator[Mistake]:
    """What is made of A, B and the scale, for the projections that are wrong."""
    config, tp, where = here.config, trial.degree, _list(wrong)

    def made(change: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], float]:
        return lambda: here.error(lambda name: change(name, *here.factors(name)), wrong)

    def scaled(factor: float) -> Callable[[], float]:
        return made(lambda name, a, b: factor * (b @ (a @ here.inputs(name))))

    scale = config.scale
    if scale != 1:
        yield Mistake("LoRA scale missing", f"the rollout adds B A without alpha / r = {scale:g}{when}, in {where}", scaled(1.0))
        yield Mistake("LoRA scale squared", f"the rollout multiplies by alpha / r = {scale:g} twice{when}, in {where}", scaled(scale**2))
    yield Mistake("LoRA scale over root rank", f"the rollout scales by alpha / √r{when}, in {where}", scaled(config.alpha / config.rank**0.5))
    yield Mistake("LoRA scale inverted", f"the rollout scales by r / alpha{when}, in {where}", scaled(1 / scale))
    if scale != 2:
        yield Mistake("LoRA halved", f"{where} adds half of what it should{when}", scaled(scale / 2))
    yield Mistake("LoRA sign flipped", f"{where} subtracts what it should add{when}", scaled(-scale))

    def rows(change: Rows) -> Callable[[], float]:
        return lambda: here.error(lambda name: change(here.want(name)), wrong)

    yield Mistake("halves swapped", f"the halves of {where} are exchanged in the rollout, [value; gate] for [gate; value]", rows(swap_halves))
    heads = sorted({h for n in wrong for h in range(2, 65) if here.projections[n][0] % h == 0 and h < here.projections[n][0]})
    for h in heads:
        for way, change in interleavings(h):
            yield Mistake("rows interleaved", f"the rows of {where} are in the rollout interleaved over {h} heads ({way})", rows(change))

    def assigned() -> float:
        taken.clear()
        for name in wrong:
            fits = {q: relative_error(here.got[name], here.want(q)) for q in here.projections if here.projections[q] == here.projections[name]}
            taken[name] = min(fits, key=lambda q: fits[q])
        return here.error(lambda name: here.want(taken[name]), wrong) if any(n != q for n, q in taken.items()) else math.inf

    taken: dict[str, str] = {}
    error = assigned()
    some = next(((n, q) for n, q in taken.items() if n != q), ("", ""))
    yield Mistake("another projection's adapter", f"{len(wrong)} projections act with another's adapter, {some[0]} with {some[1]}'s", lambda: error)
    transposed = f"of {where} is read with its axes exchanged{when}"
    yield Mistake("LoRA factor transposed", f"A {transposed}", made(lambda n, a, b: scale * (b @ (_turned(a) @ here.inputs(n)))))
    yield Mistake("LoRA factor transposed", f"B {transposed}", made(lambda n, a, b: scale * (_turned(b) @ (a @ here.inputs(n)))))
    reverse = made(lambda n, a, b: scale * (b.flip(1) @ (a @ here.inputs(n))))
    yield Mistake("ranks permuted", f"in {where} the ranks of A and B are paired in reverse", reverse)

    def rounded(kind: torch.dtype, merged: bool) -> Callable[[], float]:
        def to(v: torch.Tensor) -> torch.Tensor:
            return v.float().to(kind).double()

        return made(lambda n, a, b: (to(scale * b) if merged else scale * to(b)) @ (to(a) @ here.inputs(n)))

    def first_rows(cut: int) -> Callable[[], float]:
        return made(lambda n, a, b: scale * (b[:, :cut] @ (a[:cut] @ here.inputs(n))))

    for kind in (torch.bfloat16, torch.float16):
        dtype = str(kind).removeprefix("torch.")
        yield Mistake("LoRA rounded", f"A and B cross in {dtype}", rounded(kind, False))
        yield Mistake("LoRA rounded", f"A and alpha / r · B cross in {dtype}", rounded(kind, True))
    for cut in (8, 16, 32, 48, 64):
        if cut < config.rank:
            yield Mistake("rank cut", f"of rank {config.rank} only the first {cut} arrive", first_rows(cut))
    if tp > 1:
        yield Mistake(
            "first rank's rows everywhere", f"every rank holds the rows of rank 0 of {where}", lambda: _of_ranks(here, wrong, tp, _first_rows)
        )
        yield Mistake("fused rows cut as one block", f"the fused B of {where} is cut over ranks as one block", lambda: _cut_as_one(here, wrong, tp))
        for row in range(tp):
            text = f"{where} adds the part of rank {row} only: the ranks' parts are not summed"
            yield Mistake("one rank's part", text, lambda row=row: here.error(lambda n: _part(here, n, row, tp), wrong))  # type: ignore[misc]


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a matrix read column by column, in the shape that it has."""
    return x.reshape(x.T.shape).T if x.ndim == 2 else x


def swap_halves(x: torch.Tensor) -> torch.Tensor:
    """Rows with the second half first."""
    if len(x) % 2:
        raise ValueError("an odd number of rows has no halves")
    return torch.cat(x.chunk(2)[::-1])


def interleavings(heads: int) -> list[tuple[str, Rows]]:
    """Rows ``(heads · dim, …)`` by heads for rows by blocks, and the reverse."""
    return [
        ("by heads for by blocks", lambda x: x.reshape(heads, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)),
        ("by blocks for by heads", lambda x: x.reshape(-1, heads, *x.shape[1:]).transpose(0, 1).reshape(x.shape)),
    ]


def _part(here: Layers, name: str, rank: int, tp: int) -> torch.Tensor:
    a, b = here.factors(name)
    columns = slice(rank * a.shape[1] // tp, (rank + 1) * a.shape[1] // tp)
    return here.config.scale * (b @ (a[:, columns] @ here.inputs(name)[columns]))


def _first_rows(blocks: Sequence[torch.Tensor], tp: int) -> list[torch.Tensor]:
    return [block[: len(block) // tp].repeat(tp, 1) for block in blocks]


def _of_ranks(here: Layers, wrong: Sequence[str], tp: int, change: Callable[[Sequence[torch.Tensor], int], list[torch.Tensor]]) -> float:
    """The error where each projection is one block of its layer's rows, or two (gate and value)."""
    return max(
        min(relative_error(here.got[name], torch.cat(change(here.want(name).chunk(parts), tp)), here.want(name)) for parts in (1, 2))
        for name in wrong
    )


def _cut_as_one(here: Layers, wrong: Sequence[str], tp: int) -> float:
    """The error where the blocks of a fused layer (projections of one parent, or the halves of one) were cut over the ranks as if they were one."""
    parents: dict[str, list[str]] = {}
    for name in here.projections:
        parents.setdefault(name.rsplit(".", 1)[0], []).append(name)
    errors = []
    for name in wrong:
        mates = [m for m in parents[name.rsplit(".", 1)[0]] if here.projections[m][1] == here.projections[name][1]]
        group = [m for m in mates if m in wrong]
        options = []
        for members, turn in ((group, 1), (group, -1), ([name], 1), ([name], -1)):
            pieces = ([here.factors(m)[1] for m in members] if len(members) > 1 else list(here.factors(name)[1].chunk(2)))[::turn]
            a = here.factors(name)[0] if len(members) == 1 else None
            factors = ([here.factors(m)[0] for m in members] if a is None else [a, a])[::turn]
            cut = [chunk.split([len(p) // tp for p in pieces]) for chunk in torch.cat(pieces).chunk(tp)]
            outputs = [here.config.scale * (torch.cat([c[i] for c in cut]) @ (factors[i] @ here.inputs(name))) for i in range(len(pieces))][::turn]
            options.append(outputs[members.index(name)] if a is None else torch.cat(outputs))
        errors.append(min(relative_error(here.got[name], option, here.want(name)) for option in options))
    return max(errors)


def _stale(trial: Trial, first: Layers, second: Layers) -> Diagnosis | None:
    """Two adapters, one after the other, on top of whatever was active: what acts does not change, in all ranks or in the last."""
    names, tp = [n for n in second.projections if n in first.got and n in second.got], trial.degree
    silent = [not any(float(here.got[n].norm()) > 1e-9 for n in names) for here in (first, second)]
    if trial.says("second hand-over lost", bool(names) and silent[0] != silent[1]):
        return trial.found("second hand-over lost", "of two hand-overs, one after the other, one leaves no layer that adds anything")
    wrong = [n for n in names if relative_error(second.got[n], second.want(n)) > 1e-4]
    if not wrong or not any(float(second.got[n].norm()) > 1e-9 for n in wrong):
        return None
    if trial.says("stale adapter", all(torch.equal(first.got[n], second.got[n]) for n in names)):
        return trial.found("stale adapter", "after further hand-overs the rollout still acts with an adapter that it got before")
    if found := _in_part(trial, first, second, wrong):
        return found
    if tp == 1:
        return None

    def last(name: str) -> float:
        """How far the last rank's part is from being the same in both while all others are right; its rows, or its part of a sum."""
        errors = []
        for parts in (1, 2):
            blocks = [[t.chunk(parts) for t in (here.got[name].double(), here.want(name))] for here in (first, second)]
            rows = [slice(0, len(x) - len(x) // tp) for x in blocks[0][0]]
            others = [g[r] - w[r] for got, want in blocks for g, w, r in zip(got, want, rows, strict=True)]
            mine = [a[r.stop :] - b[r.stop :] for a, b, r in zip(blocks[0][0], blocks[1][0], rows, strict=True)]
            kept = sum(float(a[r.stop :].norm()) for a, r in zip(blocks[0][0], rows, strict=True))
            errors.append(float(torch.cat([*others, *mine]).norm()) if kept else math.inf)
        rest = [here.got[name] - here.want(name) + _part(here, name, tp - 1, tp) for here in (first, second)]
        size = float(second.want(name).norm())
        summed = float((rest[0] - rest[1]).norm()) if float(rest[0].norm()) > 1e-3 * size else math.inf
        return min(*errors, summed) / size

    residual = max(last(name) for name in wrong)
    if trial.fits("one rank has a stale adapter", residual, 1e-5):
        return trial.found("one rank has a stale adapter", f"rank {tp - 1} of {tp} keeps an adapter that it got before", residual)
    return None


def _in_part(trial: Trial, first: Layers, second: Layers, wrong: Sequence[str]) -> Diagnosis | None:
    """Two hand-overs of which some layers heard nothing, or all of them one factor only; the factor that stayed is solved for in the first."""
    acting = [n for n in wrong if float(second.got[n].norm()) > 1e-9]
    if len(acting) < len(wrong):
        return None
    kept = max(relative_error(second.got[n], first.got[n]) for n in wrong)
    if len(wrong) < len(second.projections) and trial.fits("adapter bound in part", kept, 1e-6):
        where = f"{len(wrong)} of {len(second.projections)} projections keep an earlier adapter: {_list(wrong)}"
        return trial.found("adapter bound in part", where, kept)
    scale = second.config.scale

    def stayed(name: str, factor: str) -> float:
        x = second.inputs(name)
        (a1, b1), (a2, b2) = (here.factors(name) for here in (first, second))
        got1, got2 = (here.got[name].double() / scale for here in (first, second))
        if factor == "B":  # got = B A x: B from the first A x, tried on the second
            return relative_error(torch.linalg.lstsq((a1 @ x).T, got1.T).solution.T @ (a2 @ x), got2)
        return relative_error(b2 @ torch.linalg.lstsq(b1, got1).solution, got2)

    for factor, other in (("B", "A"), ("A", "B")):
        residual = max(stayed(name, factor) for name in wrong)
        if trial.fits("adapter bound in part", residual, 1e-4):
            text = f"of each hand-over only {other} arrives in {_list(wrong)}: {factor} is what it was"
            return trial.found("adapter bound in part", text, residual)
    return None


def _second(trial: Trial, first: Layers, second: Layers) -> Diagnosis | None:
    """A second adapter after a first."""
    names, tp = list(second.projections), trial.degree
    bound = 5e-6 if trial.port.dtype == "float32" else trial.bound
    if any(name not in second.got for name in names):
        return None
    wrong = [name for name in names if relative_error(second.got[name], second.want(name)) > bound]
    if not wrong:
        return None
    scale, rank = first.config.scale, second.config.rank

    def leftover(name: str) -> torch.Tensor:
        a, b = first.factors(name)
        return second.want(name) + scale * (b[:, rank:] @ (a[rank:] @ second.inputs(name)))

    def last_rank_old() -> float:
        def mixed(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([torch.cat([n[: len(n) - len(n) // tp], o[len(o) - len(o) // tp :]]) for n, o in zip(new, old, strict=True)])

        errors = []
        for name in wrong:
            new, old = second.want(name), first.want(name)
            column = [mixed(new.chunk(parts), old.chunk(parts)) for parts in (1, 2)]
            row = new - _part(second, name, tp - 1, tp) + _part(first, name, tp - 1, tp)
            errors.append(min(relative_error(second.got[name], option, new) for option in (*column, row)))
        return max(errors)

    mistakes = [
        Mistake("stale adapter", "after a second hand-over the rollout still acts with the first adapter", lambda: second.error(first.want, wrong)),
        Mistake("rows of a larger rank stay", f"above rank {rank} the buffers keep the adapter before", lambda: second.error(leftover, wrong)),
    ]
    if tp > 1:
        mistakes.append(Mistake("one rank has a stale adapter", f"rank {tp - 1} of {tp} keeps the adapter before", last_rank_old))
    return trial.first(mistakes, bound, second.error(second.want, wrong))


def _manners(trial: Trial) -> Diagnosis | None:
    """Versions used twice, base reloads, removal, and what the hand-over does to the trainer's tensors."""
    port = trial.port
    engine: Any = port.engine(trial.degree)  # may set an adapter aside, see `Rollout`
    config, version = port.adapter, _next()
    first = _hand_over(trial, config, 505, version)
    with suppress(RuntimeError, ValueError):
        again = _hand_over(trial, config, 506, version)
        names = list(again.projections)
        if trial.fits("hand-over under a known version ignored", again.error(first.want, names), port.bound(float32=1e-5, bfloat16=2e-2)):
            return trial.found("hand-over under a known version ignored", "other weights under the active version are passed over without a word")
    state = random_adapter(port, config, 507)
    sent = {name: value.clone() for name, value in state.items()}
    engine.set_adapter(sent, config, _next())
    changed = [name for name in state if not torch.equal(state[name], sent[name])]
    if trial.says("trainer's tensors changed", bool(changed)):
        factor = float((sent[changed[0]] * state[changed[0]]).sum() / state[changed[0]].square().sum())
        return trial.found("trainer's tensors changed", f"the hand-over multiplies {len(changed)} of the trainer's own tensors by {factor:.4g}")
    engine.load_base(port.base_state())
    if engine.adapter_version() is not None:
        left = sum(float(value.norm()) for value in engine.delta_response(4, SEED).values())
        if trial.fits("adapter lost in a base reload", left, 0.0):
            return trial.found("adapter lost in a base reload", "after the base was loaded again no layer adds anything, and a version is named")
    if offers(port, "objective"):
        case = smallest(port, seed=13)
        inputs = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
        engine.set_adapter(state, config, _next())
        during = engine.velocity(*inputs)
        engine.remove_adapter()
        if trial.fits("removed adapter stays", worst(engine.velocity(*inputs), during), 0.0):
            return trial.found("removed adapter stays", "after its removal the adapter acts as before")
        if hasattr(engine, "suspend_adapter"):
            engine.set_adapter(state, config, version := _next())
            engine.suspend_adapter()
            without = engine.velocity(*inputs)
            if trial.fits("adapter set aside goes on", worst(without, during), 0.0):
                return trial.found("adapter set aside goes on", "a request without an adapter is answered with the last one")
            engine.resume_adapter(version)
            if trial.fits("adapter set aside stays off", worst(engine.velocity(*inputs), without), 0.0):
                return trial.found("adapter set aside stays off", "after a request without an adapter no layer adds it, and a version is named")
    return None


# -- base weights -----------------------------------------------------------------------------------------------------------------------------------
def base_weights(trial: Trial) -> Diagnosis | None:
    """What each base weight does in the rollout against the actor's."""
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "engine")):
        return None
    engine, state = port.engine(trial.degree), port.base_state()
    engine.remove_adapter()

    def wanted(state: State) -> dict[str, torch.Tensor]:
        want = {n: v.float() @ probe(v.shape[1], 8, SEED).T if v.ndim == 2 else v.float() for n, v in state.items()}
        return want | {f"buffer:{name}": value.float() for name, value in port.computed_buffers().items()}

    def differing(got: State, want: State) -> list[str]:
        return [n for n, v in want.items() if n in got and relative_error(got[n], v) > (2e-6 if port.dtype == "float32" else 2e-2)]

    got, want = engine.base_response(8, SEED), wanted(state)
    wrong = differing(got, want)
    if wrong:
        where = _list(wrong)

        def rows(change: Rows) -> Callable[[], float]:
            return lambda: max(relative_error(got[n], change(want[n]), want[n]) for n in wrong)

        def mistakes() -> Iterator[Mistake]:
            kind = "buffer not initialized" if all(n.startswith("buffer:") for n in wrong) else "base weights missing"
            yield Mistake(kind, f"{where} is zero in the rollout", rows(torch.zeros_like))
            yield Mistake("halves swapped", f"the halves of {where} are exchanged in the rollout", rows(swap_halves))
            for h in sorted({h for n in wrong for h in range(2, 65) if len(want[n]) % h == 0 and h < len(want[n])}):
                for way, change in interleavings(h):
                    yield Mistake("rows interleaved", f"the rows of {where} are interleaved over {h} heads ({way})", rows(change))
            if trial.degree > 1:
                text = f"every rank holds rank 0's part of {where}"
                yield Mistake("first rank's rows everywhere", text, rows(lambda x: torch.cat([x[: len(x) // trial.degree]] * trial.degree)))
            yield Mistake("rounded to bfloat16", f"{where} is rounded to bfloat16", rows(lambda x: x.bfloat16().float()))
            yield Mistake("base weights flipped", f"{where} has the other sign", rows(torch.neg))
            square = [n for n in wrong if n in state and state[n].ndim == 2 and state[n].shape[0] == state[n].shape[1]]
            if len(square) == len([n for n in wrong if want[n].ndim == 2]):
                inputs = {n: probe(state[n].shape[1], 8, SEED).T for n in square}
                text = f"{', '.join(square[:4])} acts transposed in the rollout"
                yield Mistake(
                    "base weights transposed", text, lambda: max(relative_error(got[n], state[n].float().T @ inputs[n], want[n]) for n in square)
                )
            taken = {n: _elsewhere(got[n], n, want) for n in wrong}
            names = {n: source for n, (source, _) in taken.items() if source}
            one, source = next(iter(names.items()), ("", ""))
            text = f"{len(names)} parameters are filled from others: rows of {source} stand in {one}"
            kind = "fused rows cut as one block" if trial.degree > 1 and any(own for _, own in taken.values()) else "another parameter's weights"
            yield Mistake(kind, text, lambda: 0.0 if len(names) == len(wrong) else math.inf)

        return trial.first(mistakes(), 2e-6 if port.dtype == "float32" else 2e-2, max(relative_error(got[n], want[n]) for n in wrong))
    changed = {name: value * 1.25 if value.ndim == 2 else value for name, value in state.items()}
    try:
        engine.load_base(changed)
        if trial.says("base weights of the first load", not differing(engine.base_response(8, SEED), want)):
            return trial.found("base weights of the first load", "base weights that are loaded a second time change nothing")
    finally:
        engine.load_base(state)
    return None


def _elsewhere(got: torch.Tensor, name: str, want: State) -> tuple[str, bool]:
    """The other parameter whose rows are found here, empty unless every row is a row of some parameter; and whether some rows are right."""
    sources: dict[str, int] = {}
    mates = {n: v.double() for n, v in want.items() if v.ndim == got.ndim and v.shape[1:] == got.shape[1:]}
    for row in got.double():
        size = float(row.norm()) or 1.0
        off = {n: float((v - row).reshape(len(v), -1).norm(dim=1).min()) / size for n, v in mates.items()}
        nearest = name if off[name] <= 1e-5 else min(off, key=lambda n: off[n])
        if off[nearest] > 1e-5:
            return "", False
        sources[nearest] = sources.get(nearest, 0) + 1
    others = {n: count for n, count in sources.items() if n != name}
    return (max(others, key=lambda n: others[n]) if others else ""), name in sources


# -- the actor's own adapter ------------------------------------------------------------------------------------------------------------------------
def _velocity(port: Port, seed: int = 14) -> dict[str, torch.Tensor]:
    case = smallest(port, seed=seed)
    with torch.no_grad():
        return port.predict_velocity(case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case))


def _with(port: Port, name: str | None) -> dict[str, torch.Tensor]:
    with port.using(name):
        return _velocity(port)


def selection(trial: Trial) -> Diagnosis | None:
    """Who carries LoRA, who trains, and which adapter is used when."""
    port = trial.port
    if not offers(port, "adapter"):
        return None
    carrying = {name.rsplit(".lora_", 1)[0] for name in port.adapter_state("default")}
    base, targets = port.base_state(), tuple(f".{target}.weight" for target in port.adapter.targets)
    meant = {name.removesuffix(".weight") for name, value in base.items() if value.ndim == 2 and name.endswith(targets)}
    if port.adapter.targets and trial.says("projections without an adapter", bool(meant - carrying)):
        return trial.found("projections without an adapter", f"{len(meant - carrying)} projections have no LoRA: {_list(sorted(meant - carrying))}")
    if port.adapter.targets and trial.says("adapter on other modules", bool(carrying - meant)):
        return trial.found("adapter on other modules", f"{len(carrying - meant)} modules have LoRA unasked: {_list(sorted(carrying - meant))}")
    odd = AdapterConfig(6, 12.0, port.adapter.targets)
    port.add_adapter("probe", odd)
    ranks = {value.shape[0] for name, value in port.adapter_state("probe").items() if "lora_A" in name}
    if trial.says("rank ignored", ranks != {6}):
        return trial.found("rank ignored", f"an adapter configured with rank 6 has rank {', '.join(map(str, sorted(ranks)))}")
    port.select_trainable("default")
    trains = sorted(port.trainable())
    if frozen := [name for name in trains if "lora_" not in name]:
        trial.says("base weights train", True)
        return trial.found("base weights train", f"{len(frozen)} tensors train that are no adapter's: {_list(frozen)}")
    port.add_adapter("old", port.adapter)
    after = sorted(port.trainable())
    if after != trains:
        trial.says("another adapter trains", True)
        return trial.found("another adapter trains", f"adding 'old' leaves {len(set(after) & set(trains))} of {len(trains)} tensors training")
    if not offers(port, "objective"):
        return None
    port.load_adapter("default", random_adapter(port, port.adapter, 601))
    port.load_adapter("old", random_adapter(port, port.adapter, 602))
    default, old, none = _with(port, "default"), _with(port, "old"), _with(port, None)
    state = random_adapter(port, port.adapter, 603)
    port.load_adapter("default", state)
    if trial.says("adapter without effect", worst(_with(port, "default"), default) == 0):
        return trial.found("adapter without effect", "another adapter gives the actor the same velocity")
    groups: dict[str, list[str]] = {}
    for name in port.projections():
        groups.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(name)
    whole, dead = _with(port, "default"), []
    for name, members in groups.items():
        silenced = {n: 0 * v if ".lora_B" in n and n.split(".lora_")[0] in members else v for n, v in state.items()}
        port.load_adapter("default", silenced)
        dead += [name] if worst(_with(port, "default"), whole) == 0 else []
    if trial.says("projections without effect", bool(dead)):
        return trial.found("projections without effect", f"the adapter of {', '.join(dead[:4])} does not move the actor's velocity")
    port.load_adapter("default", random_adapter(port, port.adapter, 601))
    if trial.fits("one adapter for all", worst(old, default), 0.0):
        return trial.found("one adapter for all", "asking for 'old' gives the velocity of 'default'")
    if trial.fits("reference keeps the adapter", min(worst(none, default), worst(none, old)), 1e-7):
        return trial.found("reference keeps the adapter", "asking for the base model gives the velocity with an adapter")
    before = _velocity(port)
    for used, seen in (("old", old), (None, none)):
        with suppress(KeyError), port.using(used):
            raise KeyError
        if worst(now := _velocity(port), before) > 0 and trial.fits("adapter not switched back", worst(now, seen), 0.0):
            return trial.found("adapter not switched back", f"after using({used!r}) that failed, that is still in use")
    port.add_adapter("probe", odd)
    if worst(_with(port, "probe"), none) > 0:
        values = [v for n, v in port.adapter_state("probe").items() if "lora_B" in n]
        if any(float(v.abs().max()) > 0 for v in values):
            trial.says("new adapter starts warm", True)
            return trial.found("new adapter starts warm", "B of a new adapter is not zero")
    return None


def stored(trial: Trial) -> Diagnosis | None:
    """What is loaded into an adapter against what is read back."""
    port = trial.port
    if not offers(port, "adapter"):
        return None
    if "old" not in port.adapter_names():
        port.add_adapter("old", port.adapter)

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        return {n: v.to(getattr(torch, port.dtype)).float() for n, v in random_adapter(port, port.adapter, seed).items()}

    one, two, three = drawn(611), drawn(612), drawn(613)

    def same(a: State, b: State) -> float:
        return float(sum(not torch.equal(a[name], b[name]) for name in b))

    port.load_adapter("default", one)
    port.load_adapter("old", two)
    read = port.adapter_state("default"), port.adapter_state("old")
    moved = _velocity(port) if offers(port, "objective") else {}
    port.load_adapter("default", three)
    later = port.adapter_state("default")
    if same(later, three):
        if trial.fits("stale adapter state", same(later, read[0]), 0.0):
            if moved and worst(_velocity(port), moved) > 0:
                return trial.found("stale adapter state", "reading an adapter gives what was read first, though it was loaded again since")
            return trial.found("second load ignored", "loading an adapter again changes nothing")
        exchanged = [n for n in three if not torch.equal(later[n], three[n])]
        taken = {n: next((q for q in three if three[q].shape == three[n].shape and torch.equal(later[n], three[q])), "") for n in exchanged}
        if trial.says("another projection's adapter", all(taken.values())):
            name = exchanged[0]
            return trial.found("another projection's adapter", f"{len(exchanged)} tensors come back as another's, {name} as {taken[name]}")
        if trial.fits("LoRA rounded", same(later, {n: v.bfloat16().float() for n, v in three.items()}), 0.0):
            return trial.found("LoRA rounded", "what is loaded comes back rounded to bfloat16")
    if same(read[1], two) and trial.fits("one adapter for all", same(read[1], read[0]), 0.0):
        return trial.found("one adapter for all", "reading 'old' gives 'default'")
    return None


def strength(trial: Trial) -> Diagnosis | None:
    """The effect of an adapter on the actor against that of one of scale 1 whose B carries the factor."""
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "objective")):
        return None
    config = AdapterConfig(16, 40.0, port.adapter.targets)
    state = random_adapter(port, config, 621, size=0.05)
    port.add_adapter("probe", config)
    port.load_adapter("probe", state)
    base, got = _with(port, None), _with(port, "probe")
    port.add_adapter("unit", AdapterConfig(config.rank + 3, float(config.rank + 3), config.targets))
    pad = torch.nn.functional.pad

    def error(factor: float) -> float:
        b = {n: pad(v * factor, (0, 3)) for n, v in state.items() if "lora_B" in n}
        port.load_adapter("unit", b | {n: pad(v, (0, 0, 0, 3)) for n, v in state.items() if "lora_A" in n})
        effect = _with(port, "unit")
        return max(relative_error(got[m], effect[m], effect[m] - base[m]) for m in got)

    plain, unit = error(config.scale), config.rank + 3
    if plain <= (1e-4 if port.dtype == "float32" else 0.3):
        return None

    def acting(scale: Callable[[float, float], float]) -> Callable[[], float]:
        """If adapters act with that function of alpha and rank, the one of scale 1 does too."""
        return lambda: error(scale(config.alpha, config.rank) / scale(unit, unit))

    mistakes = [
        Mistake("LoRA scale missing", "the actor's adapter acts without alpha / r", acting(lambda a, r: 1.0)),
        Mistake("LoRA scale squared", "the actor's adapter is scaled by alpha / r twice", acting(lambda a, r: (a / r) ** 2)),
        Mistake("LoRA scale over root rank", "the actor's adapter is scaled by alpha / √r", acting(lambda a, r: a / r**0.5)),
        Mistake("LoRA scale inverted", "the actor's adapter is scaled by r / alpha", acting(lambda a, r: r / a)),
        Mistake("LoRA scale is alpha", "the actor's adapter is scaled by alpha, not by alpha / r", acting(lambda a, r: a)),
    ]
    return trial.first(mistakes, 1e-3 if port.dtype == "float32" else 0.3, plain)


def gradient(trial: Trial) -> Diagnosis | None:
    """The gradient of the adapter against central differences along itself, for each modality and for A and B on their own."""
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "objective")):
        return None
    case = smallest(port, seed=15)
    port.load_adapter("default", random_adapter(port, port.adapter, 631))
    port.select_trainable("default")
    call = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    weights, parameters = case.normal("weights", port.shapes(case)), port.trainable()

    def weighted(modality: str, value: torch.Tensor) -> torch.Tensor:
        return (value.double() * weights[modality].to(value).double()).sum()

    with torch.enable_grad():
        out = port.predict_velocity(*call)
    if not any(value.requires_grad for value in out.values()):
        trial.says("no gradient", True)
        return trial.found("no gradient", "the velocity carries no graph: the policy is called under no_grad")
    tensors = list(parameters.values())
    found = {m: torch.autograd.grad(weighted(m, v), tensors, retain_graph=True, allow_unused=True) for m, v in out.items()}
    dead = [name for i, name in enumerate(parameters) if all(found[m][i] is None or not bool(found[m][i].any()) for m in out)]
    if trial.says("projections without a gradient", 0 < len(dead) < len(parameters)):
        return trial.found("projections without a gradient", f"{len(dead)} tensors get no gradient, in {_list(_projections(dead))}")
    ratios: dict[tuple[str, str], float] = {}
    for modality in out:
        gradients = dict(zip(parameters, found[modality], strict=True))
        for factor in ("lora_A", "lora_B"):
            along = {n: g for n, g in gradients.items() if factor in n and g is not None}
            size = math.sqrt(sum(float(g.double().square().sum()) for g in along.values()))
            reach = math.sqrt(sum(float(parameters[n].detach().double().square().sum()) for n in along))
            step = port.bound(float32=5e-4, bfloat16=3e-3) * reach / size
            kept, ends, predicted = {n: parameters[n].detach().clone() for n in along}, [], 0.0
            with torch.no_grad():
                for sign in (1, -1):
                    for n, g in along.items():
                        parameters[n].add_(g, alpha=sign * step)
                        predicted += sign * float(((parameters[n].double() - kept[n].double()) * g.double()).sum())
                    ends.append(float(weighted(modality, port.predict_velocity(*call)[modality])))
                    for n in along:
                        parameters[n].copy_(kept[n])
            ratios[modality, factor] = (ends[0] - ends[1]) / predicted
    near = port.bound(float32=0.02, bfloat16=0.25)
    off = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > near}
    if not off:
        return None
    modalities, factors = {m for m, _ in off}, {f for _, f in off}
    where = " and ".join(sorted(modalities)) if len(modalities) < len(out) else f"factor {factors.pop()[-1]}" if len(factors) == 1 else "every tensor"
    mean = sum(off.values()) / len(off)
    spread = max(abs(ratio / mean - 1) for ratio in off.values())
    if mean < 0 and trial.fits("gradient reversed", max(abs(r + 1) for r in off.values()), near):
        return trial.found("gradient reversed", f"the gradient of {where} points the other way", spread)
    if trial.fits("gradient scaled", spread, port.bound(float32=0.03, bfloat16=0.3)):
        return trial.found("gradient scaled", f"the gradient of {where} is {1 / mean:.3g} times what it should be", spread)
    return None
