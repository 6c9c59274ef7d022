"""Which traces are recorded, what is in them, and the faults that their tolerances are measured against.

A trace is read off a port through its seams only, in the order of the data: what goes in, schedule, prompt, packed rows, actor, the vendor's own
loop, and then the rollout at each tensor-parallel degree. A port that lacks a seam has a shorter trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from loudfail.harness.case import Case, smallest
from loudfail.harness.port import Port, need, offers, random_adapter
from loudfail.harness.trace import Trace

if TYPE_CHECKING:
    import torch

    State = Mapping[str, torch.Tensor]

#: Seeds of the adapter and of the layer inputs; part of a case's identity.
ADAPTER_SEED, RESPONSE_SEED = 11, 12
#: What a tokenizer has rules of its own for, and no other prompt of a case has: accents in two forms, compatibility characters, digits, endings,
#: kinds of white space, scripts without spaces, joiners, text that spells a special token.
UNUSUAL = "E\u0301t\u00e9 \ufb01ne \u2460 2024's I'LL  the\u00a0rain\t\r\n\n \u96e8\u3000\u0e19 \U0001f469\u200d\U0001f680 A<|im_start|> a</s>!? "
#: Probes of scorers. Some come with packages that one machine has and another has not, so one that is on one side only is not compared.
SCORES = "reward."
#: LoRA effect of the recorded adapter, as `random_adapter` counts it: large enough for bfloat16 to tell a fault in it from rounding.
ADAPTER_SIZE = 0.2


@dataclass(frozen=True)
class Change:
    """A known fault, small, that a golden has to be able to see.

    Attributes:
        claim: what is wrong, one line.
        case: changes the inputs of the run.
        adapter: changes the adapter's state before actor and rollout load it.
    """

    claim: str
    case: Callable[[Case], Case] = lambda case: case
    adapter: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda state: state


@dataclass(frozen=True)
class GoldenCase:
    """What one golden freezes.

    Attributes:
        name: short name, part of the file's name.
        claim: a sentence that is true while the golden verifies.
        case: the inputs.
        calls: model calls of the rollouts.
        changes: known faults by name.
    """

    name: str
    claim: str
    case: Case
    calls: int
    changes: Mapping[str, Change]

    def describe(self, port: Port) -> dict[str, Any]:
        """Everything that the inputs follow from, as JSON values; its hash is the case hash."""
        return {
            "case": self.name,
            "inputs": asdict(self.case),
            "calls": self.calls,
            "adapter": {**asdict(port.adapter), "seed": ADAPTER_SEED, "size": ADAPTER_SIZE},
            "responses": RESPONSE_SEED,
            "scale": port.arguments()["scale"],
            "dtype": port.dtype,
        }


def cases_of(port: Port) -> list[GoldenCase]:
    """The cases that are recorded for a port: without conditions, and with the most conditions that it knows."""
    changes = {
        "alpha_over_r_missing": Change("the adapter's scale alpha / r is left out", adapter=lambda state: _scaled_b(state, 1 / port.adapter.scale)),
        "one_projection_unbound": Change("the adapter of one projection, the smallest, reaches nothing", adapter=_without_smallest),
        "two_tokens_swapped": Change("the last two tokens of one prompt are swapped", case=_swap_last_two),
    }
    if offers(port, "adapter") and _gated(port):
        changes["fc1_halves_swapped"] = Change("value and gate half of every fc1 adapter are swapped", adapter=_swap_halves)
    modes = [(), max(port.givens, key=len)] if any(port.givens) else [()]
    return [
        GoldenCase(
            port.modes.get(given, "given" if given else "plain"),
            f"{port.name} with {' and '.join(given) + ' frame' if given else 'no frame'} given computes what it computed when this was recorded",
            smallest(port, seed=20260, prompts=("a bell rings twice", "rain"), given=given),
            3,
            changes,
        )
        for given in modes
    ]


def record_trace(port: Port, golden: GoldenCase, degrees: Sequence[int], *, change: Change | None = None, nudge: int | None = None) -> Trace:
    """Run a case on a port and keep what comes by.

    Args:
        port: it is left with the adapter that it had.
        golden: what to run.
        degrees: tensor-parallel degrees of the rollout.
        change: a fault to put in.
        nudge: a seed; with it every input is rounded another way, by at most half a unit in the last place of the port's dtype.

    Returns:
        The trace. Probes under ``inputs.`` are what goes in, all others are what comes out.

    Raises:
        Uncovered: the port offers no objective or no adapter.
        Unavailable, RankError: as the port raises them.
    """
    import torch

    need(port, "objective", "adapter")
    _forget(port)
    case = change.case(golden.case) if change else golden.case
    state = random_adapter(port, port.adapter, ADAPTER_SEED, ADAPTER_SIZE)
    state = change.adapter(state) if change else state
    noise, sigmas = case.normal("golden/noise", port.shapes(case)), case.sigmas("golden/sigma", port.modalities)
    trace = Trace()
    trace.add("inputs.weights", _summary(port.base_state()))
    for index, prompt in enumerate(case.prompts if offers(port, "prompt") else ()):
        trace.add(f"inputs.ids.{index}", torch.tensor(port.tokenize(prompt)))
    if offers(port, "prompt"):
        trace.add("inputs.ids.unusual", torch.tensor(port.tokenize(UNUSUAL)))
    # What is recorded of the inputs is float32 and nudged as float32; what runs is nudged in the dtype that the model rounds it to.
    trace.add_each("inputs.noise", _nudged(noise, nudge, "float32"))
    trace.add_each("inputs.sigma", sigmas := _nudged(sigmas, nudge, "float32"))
    trace.add("inputs.adapter", torch.stack([value.double().norm() for value in _nudged(state, nudge, "float32").values()]))
    noise, state = _nudged(noise, nudge, port.dtype), _nudged(state, nudge, port.dtype)

    trace.add_each("port.grid", port.grid(golden.calls, case))
    if offers(port, "vendor"):
        trace.add_each("vendor.grid", port.vendor_grid(golden.calls, case))
    conditions = port.conditions(case)
    for index, condition in enumerate(conditions):
        trace.add(f"embeds.{index}", condition.embeds)
    before = port.adapter_state("default")
    port.load_adapter("default", state)
    try:
        with torch.no_grad():
            _record_actor(trace, port, golden, noise, sigmas, conditions)
            _record_media(trace, port, case, noise)
    finally:
        port.load_adapter("default", before)
        port.select_trainable("default")
    if offers(port, "engine") and degrees:
        _record_rollout_prompts(trace, port, case, conditions)
        for degree in degrees:
            _record_rollout(trace, port, golden, degree, state, noise, sigmas, conditions)
    return trace


def _record_actor(trace: Trace, port: Port, golden: GoldenCase, noise: State, sigmas: State, conditions: Sequence[Any]) -> None:
    import torch

    if offers(port, "packing"):
        velocity, tables = port.observe(noise, sigmas, conditions)
        for index, table in enumerate(tables):
            told = torch.isfinite(table.sigma)
            trace.add(f"rows.{index}.modality", torch.tensor([-1 if m == "text" else port.modalities.index(m) for m in table.modality]))
            trace.add(f"rows.{index}.given", table.given)
            trace.add(f"rows.{index}.position", table.position)
            trace.add(f"rows.{index}.told", told)
            trace.add(f"rows.{index}.sigma", table.sigma[told])
            trace.add_each(f"rows.{index}.values", table.values)
    else:
        velocity = port.predict_velocity(noise, sigmas, conditions)
    with port.using(None):
        trace.add_each("actor.base", port.predict_velocity(noise, sigmas, conditions))
    trace.add_each("actor.velocity", velocity)
    if offers(port, "vendor"):
        for call, step in enumerate(port.vendor_rollout(noise, golden.calls, conditions).steps):
            trace.add_each(f"vendor.after.{call}", step.after)


def _record_media(trace: Trace, port: Port, case: Case, latents: State) -> None:
    """The sound of latents, and what scores it. Not frames, nor scores of them: whole numbers jump where all others drift."""
    import torch

    if not offers(port, "media"):
        return
    media = port.decode(latents)
    if all(getattr(one, "audio", None) is not None for one in media):
        trace.add("media.audio", torch.cat([_summary({"audio": torch.tensor(one.audio.waveform)}) for one in media]))
    if offers(port, "reward"):
        reward = port.reward()
        scores = reward.score(media, case.prompts)
        for name in (name for name, depends in reward.outputs.items() if "video" not in depends):
            trace.add(f"{SCORES}{name}", scores[name])


def _record_rollout_prompts(trace: Trace, port: Port, case: Case, conditions: Sequence[Any]) -> None:
    """How the rollout itself encodes the prompts, with the given frames where it is shown them: in the ranks of any one engine."""
    if offers(port, "presentation"):
        embeds = [condition.embeds for condition in port.rollout_conditions(case)]
    elif offers(port, "prompt"):
        embeds = [port.rollout_prompt(condition.prompt_ids)[1] for condition in conditions]
    else:
        return
    for index, rows in enumerate(embeds):
        trace.add(f"rollout.embeds.{index}", rows)


def _record_rollout(
    trace: Trace, port: Port, golden: GoldenCase, degree: int, state: State, noise: State, sigmas: State, conditions: Sequence[Any]
) -> None:
    import torch

    engine, place = port.engine(degree), f"tp{degree}"
    engine.remove_adapter()
    trace.add_each(f"{place}.grid", engine.grid(golden.calls, golden.case))
    trace.add_each(f"{place}.base", engine.velocity(noise, sigmas, conditions))
    report = engine.set_adapter(state, port.adapter, 1)
    try:
        trace.add(f"{place}.bound", torch.tensor([report.registered, report.bound]))
        trace.add_each(f"{place}.delta", dict(sorted(engine.delta_response(1, RESPONSE_SEED).items())))
        trace.add_each(f"{place}.velocity", engine.velocity(noise, sigmas, conditions))
        trace.add_each(f"{place}.final", engine.rollout(noise, golden.calls, conditions).final)
    finally:
        engine.remove_adapter()


_SOURCES_OF_ONE_GRID = re.compile(r"^(port|vendor|tp\d+)\.grid\.")
_SAMPLE = re.compile(r"^(embeds|rows|rollout\.embeds)\.\d+")
_DEGREE = re.compile(r"^tp(\d+)\.")


def same_claim(probe: str) -> str:
    """Probes with the same result name one number that was computed in different ways: at several degrees, or by several schedulers."""
    return _DEGREE.sub("tp.", _SOURCES_OF_ONE_GRID.sub("grid.", probe))


def sample_of(probe: str) -> str:
    """Probes with the same result are one quantity for several samples of the batch."""
    return _SAMPLE.sub(r"\1", probe)


def degree_of(probe: str) -> int | None:
    """The tensor-parallel degree that a probe belongs to; None for the actor's side."""
    match = _DEGREE.match(probe)
    return int(match[1]) if match else None


def runs_at(probe: str, degrees: Collection[int]) -> bool:
    """Whether a probe is in a trace of these degrees."""
    degree = degree_of(probe)
    return degree in degrees if degree is not None else bool(degrees) or not probe.startswith("rollout.")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads in this process. Also entered in the ranks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_kernels(_: object = None) -> Iterator[None]:
    """Let torch take other kernels of its own for the same operations: attention by plain products, no oneDNN. Also entered in the ranks, whose
    models are then built afresh, see `without_tiles`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        with sdpa_kernel(SDPBackend.MATH), without_tiles():
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)


@contextmanager
def without_tiles(_: object = None) -> Iterator[None]:
    """Hide AMX from vLLM, which chooses by it when a model is built: its kernels for AMX abort the process where oneDNN is off or kept from wide
    instructions. Also entered in the ranks."""
    import torch

    with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False):
        yield


def _nudged(values: State, seed: int | None, dtype: str) -> dict[str, torch.Tensor]:
    """Every element times ``1 + u``, u uniform within half a unit in the last place of ``dtype``; unchanged without a seed."""
    import torch

    if seed is None:
        return dict(values)
    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(getattr(torch, dtype)).eps / 2
    return {
        name: (value.double() * (1 + half * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1))).to(value.dtype)
        for name, value in values.items()
    }


def _forget(port: Port) -> None:
    """Empty the caches of the port's methods: a run that is repeated computes again."""
    for cls in type(port).__mro__:
        for attribute in vars(cls).values():
            if hasattr(attribute, "cache_clear"):
                attribute.cache_clear()


def _summary(state: State) -> torch.Tensor:
    """``(parameters, 2)`` float64, names in order: norm, and a mean weighted by place, which a permutation changes. A hash knows no drift: seeded
    weights differ in their last bits from one instruction set to another."""
    import torch

    rows = []
    for _, value in sorted(state.items()):
        flat = value.detach().double().reshape(-1)
        rows.append([flat.norm().item(), (flat * torch.linspace(1, 2, flat.numel(), dtype=torch.float64)).mean().item()])
    return torch.tensor(rows, dtype=torch.float64)


def _scaled_b(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: value * factor if ".lora_B." in name else value for name, value in state.items()}


def _without_smallest(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    smallest_b = min((name for name in state if ".lora_B." in name), key=lambda name: (state[name].norm().item(), name))
    return state | {smallest_b: state[smallest_b] * 0}


def _gated(port: Port) -> bool:
    """Whether feed-forwards multiply a value by a gate: their first projection is twice as wide as the second takes in."""
    sizes = port.projections()
    pairs = [(out, sizes.get(name.replace("net.0.proj", "net.2"), (0, out))[1]) for name, (out, _) in sizes.items() if "ff.net.0.proj" in name]
    return any(out == 2 * into for out, into in pairs)


def _swap_halves(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.cat(value.chunk(2)[::-1]) if name.endswith("ff.net.0.proj.lora_B.weight") else value for name, value in state.items()}


def _swap_last_two(case: Case) -> Case:
    first = case.prompts[0]
    return replace(case, prompts=(first[:-2] + first[:-3:-1], *case.prompts[1:]))
