"""From the actor to the rollout: registered ≠ bound ≠ effective ≠ current, at every tensor-parallel degree."""

from __future__ import annotations

from typing import Any

import torch

from loudfail.harness.case import smallest
from loudfail.harness.compare import chart, note, relative_error, require, require_at_least, require_close, require_equal
from loudfail.harness.port import AdapterConfig, Port, probe, random_adapter, targets
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Violation

#: Probe vectors; as many as the largest rank, so that two different deltas of that rank cannot agree on all of them.
PROBES = 64
#: Bounds, relative to the adapter's effect on one projection. Measured on clean ports: float32 ≤ 4e-7, bfloat16 ≤ 6e-3.
FLOAT32, BFLOAT16 = 5e-6, 2e-2


def expected_response(port: Port, state: dict[str, torch.Tensor], config: AdapterConfig, seed: int) -> dict[str, torch.Tensor]:
    """``alpha / r · B (A x)`` in float64 for every projection: LoRA's definition, no framework involved."""
    result = {}
    for projection, (_, in_features) in port.projections().items():
        a, b = state[f"{projection}.lora_A.weight"].double(), state[f"{projection}.lora_B.weight"].double()
        result[projection] = config.scale * (b @ (a @ probe(in_features, PROBES, seed).double().T))
    return result


def check_response(port: Port, tp: int, state: dict[str, torch.Tensor], config: AdapterConfig, where: str) -> None:
    """Every projection's measured response in the engine equals the expected one."""
    got, want = port.engine(tp).delta_response(PROBES, 17), expected_response(port, state, config, 17)
    require(set(got) >= set(want), got=f"no LoRA layer at {sorted(set(want) - set(got))[:4]}", want=f"{len(want)} projections", where=where)
    bound = port.bound(float32=FLOAT32, bfloat16=BFLOAT16)
    worst: Violation | None = None
    for projection, response in want.items():
        silent = float(response.norm()) == 0
        error = float(got[projection].norm()) if silent else relative_error(got[projection], response)
        chart(f"delta/{projection}", error)
        limit = 1e-12 if silent else bound
        note(error, limit, f"{where}, {projection}")
        if not error <= limit and (worst is None or error > float(worst.got)):  # type: ignore[arg-type]
            worst = Violation(error, "the actor's alpha / r · B A", limit, f"{where}, {projection}")
    if worst is not None:
        raise worst


def versions(port: Port) -> Any:
    """Sequences of adapters that follow each other: other ranks, alphas, weights, and some projections switched off (B = 0)."""
    from hypothesis import strategies as st

    one = st.tuples(
        st.builds(
            AdapterConfig, rank=st.sampled_from([4, 8, 24, 64]), alpha=st.sampled_from([1.0, 7.0, 128.0]), targets=st.just(port.adapter.targets)
        ),
        st.integers(0, 2**31 - 1),
        st.sets(st.sampled_from(targets(port)), max_size=2),
    )
    return st.lists(one, min_size=2, max_size=3)


_next_version = 0


def next_version() -> int:
    """A version that no hand-over of this process has used."""
    global _next_version
    _next_version += 1
    return _next_version


def hand_over(port: Port, tp: int, state: dict[str, torch.Tensor], config: AdapterConfig | None = None) -> int:
    """Hand an adapter to the engine under a new version and return the version."""
    version = next_version()
    port.engine(tp).set_adapter(state, config or port.adapter, version)
    return version


@invariant("adapter", "engine", scales=BOTH)
def every_base_weight_arrives(port: Port, tp: int) -> None:
    """Every base parameter of the actor acts the same in the rollout, and what the engine computes itself (rotary tables) is right.

    Layouts differ: fused and interleaved QKV, swapped gate and value halves, shards. A wrong half order or an uninitialized buffer leaves every shape
    right. Linears are compared by what they do to random inputs, everything else by value. Oracle: the actor's state dict and buffers.
    """
    engine = port.engine(tp)
    engine.remove_adapter()
    got, state = engine.base_response(8, 23), port.base_state()
    want = {name: value.float() @ probe(value.shape[1], 8, 23).T if value.ndim == 2 else value.float() for name, value in state.items()}
    want |= {f"buffer:{name}": value for name, value in port.computed_buffers().items()}
    missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    require(
        not missing and not extra, got=f"missing {missing[:4]}, unexpected {extra[:4]}", want=f"the actor's {len(want)} parameters", where=f"tp {tp}"
    )
    for name, value in want.items():
        bound = 1e-7 if name.startswith("buffer:") else port.bound(float32=2e-6, bfloat16=2e-2)
        require_close(got[name], value, bound=bound, where=f"tp {tp}, {name}")


@invariant("adapter", "engine", scales=BOTH)
def every_adapter_tensor_is_registered_and_bound(port: Port, tp: int) -> None:
    """The engine binds as many adapter slices as were registered, at least one for each projection, and wraps a layer for each of them.

    An adapter can register and bind to nothing, or lose the one projection whose name has no counterpart. Counts only; whether
    they act is the next check.
    """
    engine, projections = port.engine(tp), port.projections()
    version = next_version()
    report = engine.set_adapter(random_adapter(port, port.adapter, 31), port.adapter, version)
    require(report.registered >= len(projections), got=report.registered, want=f"at least {len(projections)}", where=f"tp {tp}, registered")
    require(report.bound == report.registered, got=report.bound, want=report.registered, where=f"tp {tp}, bound")
    for target in targets(port):
        here = [name for name in engine.delta_response(1, 0) if name.endswith(f".{target}")]
        want = [name for name in projections if name.endswith(f".{target}")]
        require(sorted(here) == sorted(want), got=f"{len(here)} layers", want=f"{len(want)} layers", where=f"tp {tp}, {target}")


@invariant("adapter", "engine", scales=BOTH)
def every_projection_reaches_the_rollout(port: Port, tp: int) -> None:
    """For every projection, what the fused layer really adds, put together from all ranks, is alpha / r · B A of the actor.

    The one check that sees a skipped, halved, swapped, mis-sliced or mis-scaled projection and says which. Oracle: LoRA's definition in float64.
    """
    state = random_adapter(port, port.adapter, 37)
    hand_over(port, tp, state)
    check_response(port, tp, state, port.adapter, f"tp {tp}")


@invariant("adapter", "engine")
def each_projection_alone_reaches_only_itself(port: Port, tp: int) -> None:
    """An adapter whose B is zero except in one target changes that target's layers and no other.

    Swapped names (k into v, gate into value) can cancel in a sum; one at a time they cannot.
    """
    state = random_adapter(port, port.adapter, 41)
    for target in targets(port):
        only = {n: v if n.rsplit(".lora_", 1)[0].endswith(f".{target}") else torch.zeros_like(v) for n, v in state.items()}
        hand_over(port, tp, only)
        check_response(port, tp, only, port.adapter, f"tp {tp}, {target} alone")


@invariant("adapter", "engine", scales=BOTH, examples=3, sequence=versions)
def the_newest_hand_over_is_the_one_in_effect(port: Port, tp: int, sequence: list[tuple[AdapterConfig, int, set[str]]]) -> None:
    """After each of several hand-overs, with other ranks, alphas and switched-off projections, exactly the newest adapter acts, under its version.

    Engines cache adapters by id, keep larger buffers of an earlier rank, and skip what they believe to know (vllm #42125): the second sync changes
    nothing and nobody says so.
    """
    engine = port.engine(tp)
    for place, (config, seed, off) in enumerate(sequence):
        state = random_adapter(port, config, seed)
        for name in state:
            if name.endswith("lora_B.weight") and any(name.rsplit(".lora_", 1)[0].endswith(f".{target}") for target in off):
                state[name] = torch.zeros_like(state[name])
        version = hand_over(port, tp, state, config)
        require(engine.adapter_version() == version, got=engine.adapter_version(), want=version, where=f"tp {tp}, hand-over {place}")
        check_response(port, tp, state, config, f"tp {tp}, hand-over {place}, rank {config.rank}")


@invariant("adapter", "engine")
def a_reused_version_is_refused_or_takes_effect(port: Port, tp: int) -> None:
    """Handing other weights over under a version that is already active either raises or makes the new weights act; it is never ignored.

    vLLM-Omni's manager returns quietly for a known id: the trainer believes in a sync that did not happen.
    """
    engine = port.engine(tp)
    first, second = random_adapter(port, port.adapter, 43), random_adapter(port, port.adapter, 47)
    version = hand_over(port, tp, first)
    try:
        engine.set_adapter(second, port.adapter, version)
    except (RuntimeError, ValueError):
        require(engine.adapter_version() == version, got=engine.adapter_version(), want=version, where=f"tp {tp}, after a refusal")
        check_response(port, tp, first, port.adapter, f"tp {tp}, after a refusal")
    else:
        check_response(port, tp, second, port.adapter, f"tp {tp}, version used twice")


@invariant("adapter", "engine", "objective")
def removing_the_adapter_gives_the_base_model_back(port: Port, tp: int) -> None:
    """After an adapter was active and is removed, the rollout's velocity is bit for bit what it was before, and no version is reported.

    Oracle: the engine before the hand-over.
    """
    engine = port.engine(tp)
    engine.remove_adapter()
    case = smallest(port, seed=8, prompts=("rain", "a bell rings twice"))
    inputs = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    before = engine.velocity(*inputs)
    hand_over(port, tp, random_adapter(port, port.adapter, 53))
    during = engine.velocity(*inputs)
    engine.remove_adapter()
    after = engine.velocity(*inputs)
    for modality in before:
        require_at_least(
            relative_error(during[modality], before[modality]), port.bound(float32=1e-2, bfloat16=5e-2), where=f"tp {tp}, {modality}, effect"
        )
        require_equal(after[modality], before[modality], where=f"tp {tp}, {modality}, after removal")
    require(engine.adapter_version() is None, got=engine.adapter_version(), want=None, where=f"tp {tp}, version after removal")


@invariant("adapter", "engine", "objective")
def a_request_without_the_adapter_between_two_with_it_gets_the_base_model(port: Port, tp: int) -> None:
    """A rollout that sets its adapter aside for one request answers that one as the base model, and the next as the adapter does, bit for bit.

    Engines keep the weights loaded and take a mask off and on. One that stays on lets the policy answer for its own reference; one that stays off
    samples the base. Removing the adapter clears the weights and shows neither, so an engine that can set it aside offers ``suspend_adapter()`` and
    ``resume_adapter(version)`` beside what `Rollout` demands. Oracle: the engine before the hand-over, and before the request.
    """
    engine: Any = port.engine(tp)
    engine.remove_adapter()
    case = smallest(port, seed=8, prompts=("rain", "a bell rings twice"))
    inputs = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    base, state = engine.velocity(*inputs), random_adapter(port, port.adapter, 54)
    version = hand_over(port, tp, state)
    acting = engine.velocity(*inputs)
    effect = port.bound(float32=1e-2, bfloat16=5e-2)
    for modality in base:
        require_at_least(relative_error(acting[modality], base[modality]), effect, where=f"tp {tp}, {modality}, effect")
    for request in ("first", "second"):
        getattr(engine, "suspend_adapter", engine.remove_adapter)()
        require(engine.adapter_version() is None, got=engine.adapter_version(), want=None, where=f"tp {tp}, version in the {request} request")
        without = engine.velocity(*inputs)
        if hasattr(engine, "resume_adapter"):
            engine.resume_adapter(version)
        else:
            hand_over(port, tp, state)
        after = engine.velocity(*inputs)
        for modality in base:
            require_equal(without[modality], base[modality], where=f"tp {tp}, {modality}, {request} request without the adapter")
            require_equal(after[modality], acting[modality], where=f"tp {tp}, {modality}, after the {request} request without it")


@invariant("adapter", "engine")
def a_base_reload_does_not_leave_a_phantom_adapter(port: Port, tp: int) -> None:
    """After the base weights were loaded again, either the adapter still acts or no version is reported.

    Sleep and wake, or a full weight sync, drop the adapter while the engine still names it (verl #3516): the next rollout samples the base.
    """
    engine = port.engine(tp)
    state = random_adapter(port, port.adapter, 59)
    hand_over(port, tp, state)
    engine.load_base(port.base_state())
    if engine.adapter_version() is None:
        response = engine.delta_response(4, 17)
        size = sum(float(value.norm()) for value in response.values())
        require(size == 0, got=size, want="no layer adds anything", where=f"tp {tp}, no version reported")
    else:
        check_response(port, tp, state, port.adapter, f"tp {tp}, after a base reload")


@invariant("adapter", "engine")
def a_hand_over_leaves_the_trainers_tensors_alone(port: Port, tp: int) -> None:
    """The state that was handed over is bit for bit the same afterwards, and changing it later does not change the rollout.

    Merging the scale into B in place, or sharing memory with the engine, makes the policy drift between syncs.
    """
    state = random_adapter(port, port.adapter, 61)
    copy = {name: value.clone() for name, value in state.items()}
    hand_over(port, tp, state)
    for name, value in copy.items():
        require_equal(state[name], value, where=f"tp {tp}, {name}")
        state[name].add_(1.0)
    check_response(port, tp, copy, port.adapter, f"tp {tp}, after the trainer changed its tensors")


@invariant("adapter", "engine")
def adapters_of_every_rank_and_alpha_reach_the_rollout(port: Port, tp: int) -> None:
    """Adapters of rank 1 to 128, with alphas above and below the rank, all arrive with their full rank and their own scale.

    Buffers have a largest rank, sizes are rounded up, and alpha / rank is taken from the wrong one of two places; one rank alone shows none of it.
    """
    for rank, alpha in ((1, 3.0), (16, 64.0), (32, 5.0), (48, 48.0), (100, 250.0), (128, 64.0)):
        config = AdapterConfig(rank, alpha, port.adapter.targets)
        state = random_adapter(port, config, 100 + rank)
        hand_over(port, tp, state, config)
        check_response(port, tp, state, config, f"tp {tp}, rank {rank}, alpha {alpha:g}")


@invariant("adapter", "engine")
def a_second_base_load_takes_effect(port: Port, tp: int) -> None:
    """Base weights that are loaded again with other values act; the first ones do not stay.

    Engines repack weights after the first load and may keep the copy; a full weight sync then changes nothing.
    """
    engine, state = port.engine(tp), port.base_state()
    changed = {name: value * 1.25 if value.ndim == 2 else value for name, value in state.items()}
    try:
        engine.load_base(changed)
        got = engine.base_response(4, 29)
        for name, value in changed.items():
            if value.ndim == 2:
                want = value.float() @ probe(value.shape[1], 4, 29).T
                require_close(got[name], want, bound=port.bound(float32=2e-6, bfloat16=2e-2), where=f"tp {tp}, {name}, second load")
    finally:
        engine.load_base(state)
