"""The rollout's model and loop against the actor: the same velocity, with and without adapter, and the same trajectory."""

from __future__ import annotations

import torch

from loudfail.harness.case import Case, cases, largest, mixed_conditions, smallest
from loudfail.harness.compare import chart, relative_error, require, require_at_least, require_close, require_each_close, require_equal
from loudfail.harness.port import Port, random_adapter
from loudfail.harness.registry import BOTH, invariant
from loudfail.invariants.schedule import rounding_of_kept
from loudfail.invariants.sync import hand_over

#: Bounds on clean ports. Measured: base 4e-7 (float32), 1e-2 (bfloat16); adapter effect 2e-6, 3e-2; final latents 1e-6, 2e-2.
BASE = {"float32": 1e-6, "bfloat16": 3e-2}
EFFECT = {"float32": 5e-6, "bfloat16": 1e-1}
REPLAY = {"float32": 1e-5, "bfloat16": 6e-2}


def inputs(port: Port, case: Case) -> tuple:
    return case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)


@invariant("objective", "engine", "adapter", scales=BOTH, examples=3, case=cases(batch=(1, 2)))
def the_base_velocity_is_the_actors(port: Port, tp: int, case: Case) -> None:
    """Without an adapter, the rollout's velocity equals the actor's, per modality, for any extent, prompt, sigma pair and condition mode.

    Sees wrong weights, layouts, positions, tags, time labels, signs and attention masks of either side. Oracle: the other framework.
    """
    engine = port.engine(tp)
    engine.remove_adapter()
    with torch.no_grad(), port.using(None):
        want = port.predict_velocity(*inputs(port, case))
    require_each_close(
        engine.velocity(*inputs(port, case)), want, bound=port.bound(**BASE), where=f"tp {tp}, given {case.given}, {dict(case.extent)}"
    )


@invariant("objective", "engine", "adapter", scales=BOTH, examples=2, case=cases(batch=(1, 2)))
def the_adapters_effect_is_the_actors(port: Port, tp: int, case: Case) -> None:
    """The change that the adapter makes to the velocity is the same in the rollout as in the actor, measured against that change.

    Relative to the output, a LoRA that is lost in one projection hides in rounding; relative to its own effect it cannot.
    Oracle: the other framework.
    """
    engine = port.engine(tp)
    state = random_adapter(port, port.adapter, case.seed)
    port.load_adapter("default", state)
    with torch.no_grad():
        with port.using(None):
            base = port.predict_velocity(*inputs(port, case))
        adapted = port.predict_velocity(*inputs(port, case))
    engine.remove_adapter()
    engine_base = engine.velocity(*inputs(port, case))
    hand_over(port, tp, state)
    engine_adapted = engine.velocity(*inputs(port, case))
    effect = {m: adapted[m] - base[m] for m in port.modalities}
    for modality in port.modalities:
        require_at_least(
            relative_error(adapted[modality], base[modality]), port.bound(float32=1e-2, bfloat16=5e-2), where=f"tp {tp}, {modality}, effect"
        )
    got = {m: engine_adapted[m] - engine_base[m] for m in port.modalities}
    require_each_close(got, effect, bound=port.bound(**EFFECT), where=f"tp {tp}, given {case.given}, {dict(case.extent)}")


@invariant("objective", "engine", "adapter", scales=BOTH, examples=2, case=cases(batch=(1, 2)))
def velocity_replay_agrees_at_every_step(port: Port, tp: int, case: Case) -> None:
    """The trainer's old policy, asked again at the latents and sigmas that the rollout recorded, returns the velocity that the rollout recorded.

    The best single check: it sees wrong time, wrong sign, missing, partial, swapped or mis-scaled LoRA, the wrong adapter, and prompt drift, and is
    cheap enough for every hand-over of a real run. Needs B ≠ 0. The training adapter differs from ``old`` here, so that using the wrong one shows.
    """
    engine = port.engine(tp)
    old = random_adapter(port, port.adapter, case.seed + 1)
    if "old" not in port.adapter_names():
        port.add_adapter("old", port.adapter)
    port.load_adapter("old", old)
    port.load_adapter("default", random_adapter(port, port.adapter, case.seed + 2))
    hand_over(port, tp, port.adapter_state("old"))
    conditions = port.conditions(case)
    trajectory = engine.rollout(case.normal("noise", port.shapes(case)), 4, conditions)
    require(len(trajectory.steps) == 4, got=len(trajectory.steps), want=4, where=f"tp {tp}, model calls")
    for call, step in enumerate(trajectory.steps):
        with torch.no_grad(), port.using("old"):
            again = port.predict_velocity(step.latents, step.sigmas, conditions)
        for modality in port.modalities:
            where = f"tp {tp}, call {call}, {modality}, sigma {float(step.sigmas[modality][0]):.3f}"
            chart(f"replay/{modality}/{float(step.sigmas[modality][0]):.4f}", relative_error(again[modality], step.velocity[modality]))
            require_close(again[modality], step.velocity[modality], bound=port.bound(**REPLAY), where=where)


@invariant("vendor", "engine", "adapter", examples=2, case=cases(batch=(1, 1)))
def the_rollouts_loop_ends_where_the_vendors_does(port: Port, tp: int, case: Case) -> None:
    """From the same noise and with the same adapter, the rollout's own loop and the vendor's reference loop end at the same latents.

    Two independent implementations of layout, schedule, conditions and step. Oracle: the vendor's loop on the actor.
    """
    state = random_adapter(port, port.adapter, case.seed + 3)
    port.load_adapter("default", state)
    hand_over(port, tp, state)
    noise, conditions = case.normal("noise", port.shapes(case)), port.conditions(case)
    want = port.vendor_rollout(noise, 5, conditions).final
    got = port.engine(tp).rollout(noise, 5, conditions).final
    require_each_close(got, want, bound=port.bound(**REPLAY), where=f"tp {tp}, given {case.given}, {dict(case.extent)}")


@invariant("objective", "engine", examples=2, case=cases(batch=(1, 2)))
def recorded_steps_are_what_happened(port: Port, tp: int, case: Case) -> None:
    """A rollout starts from the given noise, each step continues where the last ended, and moves by (next sigma − sigma) · velocity per modality.

    A recorder that is off by one step, records before a conditioning reset, or logs another modality's sigma poisons training data. Oracle: the Euler
    step of the flow's ODE in float64.
    """
    engine = port.engine(tp)
    # Noise that the port's dtype holds exactly: some loops keep their latents in bfloat16, and must start from the noise all the same.
    noise = {m: value.to(getattr(torch, port.dtype)).float() for m, value in case.normal("noise", port.shapes(case)).items()}
    trajectory, grid = engine.rollout(noise, 4, port.conditions(case)), engine.grid(4, case)
    last = noise
    for call, step in enumerate(trajectory.steps):
        for modality in port.modalities:
            where = f"tp {tp}, call {call}, {modality}"
            require_close(step.latents[modality], last[modality], bound=1e-7, where=f"{where}, start")
            require_close(step.sigmas[modality], grid[modality][call].expand(case.batch), bound=1e-6, where=f"{where}, sigma")
            change = float(grid[modality][call + 1] - grid[modality][call])
            want = step.latents[modality].double() + change * step.velocity[modality].double()
            moved = float((abs(change) * step.velocity[modality]).norm())
            bound = max(port.bound(float32=2e-5, bfloat16=2e-2), rounding_of_kept(port, step.after[modality], moved))
            require_close(step.after[modality].double(), want, scale=moved, bound=bound, where=f"{where}, step")
        last = step.after


@invariant("objective", "engine", scales=BOTH)
def all_ranks_return_the_same_velocity(port: Port, tp: int) -> None:
    """Every rank returns the same velocity, bit for bit.

    A collective that is skipped, or a rank that kept an older adapter, shows in one rank only; the driver usually reads rank 0.
    """
    engine = port.engine(tp)
    case = smallest(port, seed=21, prompts=("rain",), given=max(port.givens, key=len))
    hand_over(port, tp, random_adapter(port, port.adapter, 67))
    outputs = engine.replicated(*inputs(port, case))
    require(len(outputs) == tp, got=len(outputs), want=tp, where="ranks")
    for rank, output in enumerate(outputs):
        for modality in port.modalities:
            require_equal(output[modality], outputs[0][modality], where=f"tp {tp}, rank {rank}, {modality}")
            require(bool(torch.isfinite(output[modality]).all()), got="not finite", want="finite", where=f"tp {tp}, rank {rank}, {modality}")


@invariant("objective", "engine", examples=2, case=cases(batch=(2, 3)))
def a_batch_is_its_samples(port: Port, tp: int, case: Case) -> None:
    """The velocity of a batch with unequal prompts and sigmas equals that of its samples asked one by one.

    Padding, one time label for the whole batch or attention across samples make a batch more than its samples.
    Oracle: the same engine, one by one.
    """
    engine = port.engine(tp)
    latents, sigmas, conditions = inputs(port, case)
    together = engine.velocity(latents, sigmas, conditions)
    for index, condition in enumerate(conditions):
        one = engine.velocity(
            {m: v[index : index + 1] for m, v in latents.items()}, {m: s[index : index + 1] for m, s in sigmas.items()}, [condition]
        )
        want = {m: v[0] for m, v in one.items()}
        require_each_close(
            {m: v[index] for m, v in together.items()}, want, bound=port.bound(float32=1e-6, bfloat16=2e-2), where=f"tp {tp}, sample {index}"
        )


@invariant("objective", "engine")
def the_same_noise_gives_the_same_rollout(port: Port, tp: int) -> None:
    """Two rollouts from the same noise are bit for bit the same, and another noise gives another result in every modality.

    Hidden randomness in the loop (re-noising, dropout) breaks replay; ignored noise gives every group one sample.
    """
    engine = port.engine(tp)
    case = smallest(port, seed=33, prompts=("rain",))
    conditions = port.conditions(case)
    noise, other = case.normal("noise", port.shapes(case)), case.normal("other", port.shapes(case))
    first, second, third = (engine.rollout(n, 3, conditions).final for n in (noise, noise, other))
    for modality in port.modalities:
        require_equal(second[modality], first[modality], where=f"tp {tp}, {modality}, same noise")
        require_at_least(relative_error(third[modality], first[modality]), 1e-2, where=f"tp {tp}, {modality}, other noise")


@invariant("objective", "engine")
def the_rollout_hears_every_modality_of_the_noise(port: Port, tp: int) -> None:
    """Changing the noise of one modality changes the rollout of that modality, and through the joint model the others too.

    A modality that is generated apart, or from a fixed seed, breaks joint training without a word.
    """
    engine = port.engine(tp)
    case = smallest(port, seed=34, prompts=("rain",))
    conditions = port.conditions(case)
    noise, other = case.normal("noise", port.shapes(case)), case.normal("other", port.shapes(case))
    base = engine.rollout(noise, 3, conditions).final
    for changed in port.modalities:
        result = engine.rollout(noise | {changed: other[changed]}, 3, conditions).final
        for modality in port.modalities:
            least = 1e-2 if modality == changed else 1e-5
            require_at_least(relative_error(result[modality], base[modality]), least, where=f"tp {tp}, noise of {changed} changed, {modality}")


@invariant("objective", "engine", "adapter")
def the_adapter_acts_at_every_noise_level(port: Port, tp: int) -> None:
    """At levels from almost pure noise to almost clean, the adapter's effect is the actor's.

    Caches and skip rules switch parts of the model off by level (step caches, timestep gates): right in the middle, wrong at an end.
    """
    levels = torch.tensor([0.999, 0.7, 0.4, 0.15, 0.05, 0.01])
    case = smallest(port, seed=35, prompts=("rain",) * len(levels))
    one = {m: v[:1].expand(len(levels), *v.shape[1:]).contiguous() for m, v in case.normal("latents", port.shapes(case)).items()}
    call = one, dict.fromkeys(port.modalities, levels), port.conditions(case)
    engine, state = port.engine(tp), random_adapter(port, port.adapter, 73)
    port.load_adapter("default", state)
    with torch.no_grad():
        with port.using(None):
            base = port.predict_velocity(*call)
        adapted = port.predict_velocity(*call)
    engine.remove_adapter()
    engine_base = engine.velocity(*call)
    hand_over(port, tp, state)
    engine_adapted = engine.velocity(*call)
    for modality in port.modalities:
        for index, level in enumerate(levels.tolist()):
            effect = adapted[modality][index] - base[modality][index]
            got = engine_adapted[modality][index] - engine_base[modality][index]
            require_close(got, effect, bound=port.bound(float32=2e-5, bfloat16=0.15), where=f"tp {tp}, {modality}, sigma {level:g}")


@invariant("objective", "engine", "adapter")
def long_sequences_agree(port: Port, tp: int) -> None:
    """With the longest prompt, the largest clip and every frame given that can be, base velocity and adapter's effect are the actor's.

    Prompts are cut or padded at 77 or 128 tokens, rotary tables end, attention switches kernels with length: short fixtures see none of it.
    """
    case = largest(port, seed=36, given=max(port.givens, key=len))
    engine, state = port.engine(tp), random_adapter(port, port.adapter, 79)
    port.load_adapter("default", state)
    with torch.no_grad():
        with port.using(None):
            base = port.predict_velocity(*inputs(port, case))
        adapted = port.predict_velocity(*inputs(port, case))
    engine.remove_adapter()
    engine_base = engine.velocity(*inputs(port, case))
    hand_over(port, tp, state)
    engine_adapted = engine.velocity(*inputs(port, case))
    require_each_close(engine_base, base, bound=port.bound(**BASE), where=f"tp {tp}, base")
    effect = {m: adapted[m] - base[m] for m in port.modalities}
    got = {m: engine_adapted[m] - engine_base[m] for m in port.modalities}
    require_each_close(got, effect, bound=port.bound(float32=2e-5, bfloat16=0.15), where=f"tp {tp}, adapter's effect")


@invariant("objective", "engine", "adapter")
def velocity_replay_agrees_late_in_a_long_rollout(port: Port, tp: int) -> None:
    """In a rollout of twelve calls, the old policy returns the recorded velocity at the first, a middle and the last three calls.

    Step caches reuse an earlier call's output once steps become small, which a rollout of four calls never reaches.
    """
    engine, state = port.engine(tp), random_adapter(port, port.adapter, 83)
    port.load_adapter("default", state)
    hand_over(port, tp, state)
    case = smallest(port, seed=37, prompts=("two dogs bark",))
    conditions = port.conditions(case)
    trajectory = engine.rollout(case.normal("noise", port.shapes(case)), 12, conditions)
    require(len(trajectory.steps) == 12, got=len(trajectory.steps), want=12, where=f"tp {tp}, model calls")
    for call in (0, 5, 9, 10, 11):
        step = trajectory.steps[call]
        with torch.no_grad():
            again = port.predict_velocity(step.latents, step.sigmas, conditions)
        require_each_close(again, step.velocity, bound=port.bound(**REPLAY), where=f"tp {tp}, call {call} of 12")


@invariant("objective", "engine")
def a_batch_of_rollouts_is_its_samples(port: Port, tp: int) -> None:
    """Four rollouts with different prompts, in each condition mode, end where the four end one by one.

    A batch that shares the first sample's prompt, mask or noise trains every sample on another's conditions.
    """
    engine = port.engine(tp)
    case = smallest(port, seed=38, prompts=("rain", "a bell rings twice", " two dogs bark", "rain"))
    noise = case.normal("noise", port.shapes(case))
    conditions = mixed_conditions(port, case)
    together = engine.rollout(noise, 2, conditions).final
    for index, condition in enumerate(conditions):
        alone = engine.rollout({m: v[index : index + 1] for m, v in noise.items()}, 2, [condition]).final
        for modality in port.modalities:
            bound = port.bound(float32=2e-6, bfloat16=5e-2)
            require_close(together[modality][index], alone[modality][0], bound=bound, where=f"tp {tp}, {modality}, sample {index}")
