"""The actor's LoRA: who carries it, who trains, which one is used, and how strongly."""

from __future__ import annotations

from typing import Any

import torch

from loudfail.harness.case import Case, cases, smallest
from loudfail.harness.compare import chart, note, relative_error, require, require_at_least, require_close, require_each_close, require_equal
from loudfail.harness.port import AdapterConfig, Port, random_adapter
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Uncovered, Violation


def configs(port: Port) -> Any:
    """Ranks and alphas that are neither the maximum nor equal to each other."""
    from hypothesis import strategies as st

    return st.builds(
        AdapterConfig,
        rank=st.sampled_from([1, 6, 16, 32, 48, 64, 100, 128]),
        alpha=st.sampled_from([1.0, 7.0, 12.0, 128.0]),
        targets=st.just(port.adapter.targets),
    )


def seeds(port: Port) -> Any:
    from hypothesis import strategies as st

    return st.integers(0, 2**31 - 1)


def velocity(port: Port, case: Case) -> dict[str, torch.Tensor]:
    """The actor's velocity on the case's noise and sigmas, without gradient."""
    with torch.no_grad():
        return port.predict_velocity(case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case))


def scaled(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The same adapter with its B factors multiplied."""
    return {name: value * factor if name.endswith("lora_B.weight") else value for name, value in state.items()}


def padded(state: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The same adapter at a larger rank: A with rows of zeros, B with columns of zeros."""
    pad = torch.nn.functional.pad
    return {n: pad(v, (0, rank - v.shape[1])) if n.endswith("lora_B.weight") else pad(v, (0, 0, 0, rank - v.shape[0])) for n, v in state.items()}


@invariant("adapter", scales=BOTH)
def every_configured_projection_carries_lora_and_nothing_else_does(port: Port) -> None:
    """LoRA sits on every base weight whose name ends in a configured target, and on no other.

    A target that matches nothing, or a suffix that also matches modules the rollout does not know (token refiners), is silent: the loss falls anyway.
    Oracle: the names in the vendor's own state dict. Not covered: whether the rollout knows them (`sync`).
    """
    if not port.adapter.targets:
        raise Uncovered(f"port {port.name!r} configures no targets: nothing but its own projections says what should carry LoRA")
    want = {
        name.removesuffix(".weight")
        for name, value in port.base_state().items()
        if value.ndim == 2 and any(name.endswith(f".{target}.weight") for target in port.adapter.targets)
    }
    got = {name.rsplit(".lora_", 1)[0] for name in port.adapter_state("default")}
    require(bool(want), got="no base weight matches", want=f"base weights that end in {port.adapter.targets}", where="adapter targets")
    for target in port.adapter.targets:
        found = sum(name.endswith(f".{target}") for name in want)
        require(found > 0, got=0, want="at least one module", where=f"target {target}")
        chart(f"modules/{target}", found)
    require(
        got == want, got=f"missing {sorted(want - got)[:4]}, extra {sorted(got - want)[:4]}", want=f"{len(want)} modules", where="adapter default"
    )


@invariant("adapter", scales=BOTH, examples=4, config=configs)
def both_factors_have_the_configured_rank(port: Port, config: AdapterConfig) -> None:
    """A is (rank, in) and B is (out, rank) of the base weight, for every projection and any configured rank.

    Breaks when a factor is transposed, padded or truncated on its way in or out of PEFT. Oracle: shapes in the vendor's state dict.
    """
    port.add_adapter("probe", config)
    base = port.base_state()
    for name, value in port.adapter_state("probe").items():
        module, _, factor = name.rpartition(".lora_")
        out_features, in_features = base[f"{module}.weight"].shape
        want = (config.rank, in_features) if factor.startswith("A") else (out_features, config.rank)
        require(tuple(value.shape) == want, got=tuple(value.shape), want=want, where=name)


@invariant("adapter", "objective", scales=BOTH, examples=4, case=cases(batch=(1, 2)), config=configs)
def a_new_adapter_changes_nothing(port: Port, case: Case, config: AdapterConfig) -> None:
    """A freshly added adapter leaves the velocity bit for bit that of the base model.

    PEFT starts B at zero. If a fresh adapter moves the output, the reference policy is not the base model. Oracle: the model with adapters off.
    """
    port.add_adapter("probe", config)
    with port.using(None):
        base = velocity(port, case)
    with port.using("probe"):
        fresh = velocity(port, case)
    for modality in port.modalities:
        require_equal(fresh[modality], base[modality], where=f"{modality}, rank {config.rank}, alpha {config.alpha:g}")


@invariant("adapter", "objective", examples=5, case=cases(batch=(1, 1)), config=configs, seed=seeds)
def the_scale_of_an_adapter_is_alpha_over_rank(port: Port, case: Case, config: AdapterConfig, seed: int) -> None:
    """An adapter with alpha and rank r acts as one of another rank and scale 1 that has the same A, and B multiplied by alpha / r.

    A lost alpha (scale 1), alpha / sqrt(r) or a scale applied twice changes the policy's strength only; no curve shows it. Oracle: LoRA's definition,
    W + alpha / r · B A (arXiv 2106.09685), through an adapter of scale 1.
    """
    state = random_adapter(port, config, seed)
    port.add_adapter("probe", config)
    port.load_adapter("probe", state)
    with port.using("probe"):
        got = velocity(port, case)
    rank = config.rank + 3
    port.add_adapter("unit", AdapterConfig(rank, float(rank), config.targets))
    port.load_adapter("unit", padded(scaled(state, config.alpha / config.rank), rank))
    with port.using("unit"):
        want = velocity(port, case)
    with port.using(None):
        base = velocity(port, case)
    effect = {m: want[m] - base[m] for m in want}
    bound = port.bound(float32=2e-5, bfloat16=0.3)
    require_each_close({m: got[m] - base[m] for m in got}, effect, bound=bound, where=f"rank {config.rank}, alpha {config.alpha:g}")


@invariant("adapter", "objective")
def every_projection_moves_the_velocity(port: Port) -> None:
    """Switching on the B factor of any single projection moves the velocity.

    An adapter can register on layers that the forward pass never calls. Not covered: whether the rollout moves too.
    """
    case = smallest(port, seed=11, given=max(port.givens, key=len))
    state = random_adapter(port, port.adapter, 5)
    with port.using(None):
        base = velocity(port, case)
    for projection in port.projections():
        port.load_adapter("default", {n: v if n.startswith(f"{projection}.") else torch.zeros_like(v) for n, v in state.items()})
        moved = max(relative_error(value, base[modality]) for modality, value in velocity(port, case).items())
        require_at_least(moved, port.bound(float32=1e-5, bfloat16=1e-3), where=projection)


@invariant("adapter", "objective", examples=2, case=cases(batch=(1, 2)))
def every_trainable_factor_gets_a_gradient_and_nothing_else_does(port: Port, case: Case) -> None:
    """After a backward pass, A and B of every projection of the training adapter have a gradient, and no base weight or other adapter has one.

    Re-entrant checkpointing, a no-grad block or a frozen adapter leave the loss finite and the policy where it was. B ≠ 0 here: at B = 0 the gradient
    of A is zero by construction.
    """
    if "old" not in port.adapter_names():
        port.add_adapter("old", port.adapter)
    port.load_adapter("default", random_adapter(port, port.adapter, 3))
    port.select_trainable("default")
    out = port.predict_velocity(case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case))
    for modality, value in out.items():
        require(value.requires_grad, got="the velocity carries no gradient", want="a graph back to the adapter", where=modality)
    weights = case.normal("weights", {m: tuple(v.shape[1:]) for m, v in out.items()})
    parameters = port.trainable()
    loss = torch.stack([(out[m] * weights[m].to(out[m])).sum() for m in out]).sum()
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    require(len(parameters) == 2 * len(port.projections()), got=len(parameters), want=2 * len(port.projections()), where="trainable tensors")
    for (name, _), gradient in zip(parameters.items(), gradients, strict=True):
        require("lora_" in name and ".old." not in name, got=name, want="a factor of the training adapter", where="trainable tensors")
        require_at_least(0.0 if gradient is None else gradient.float().norm().item(), 1e-12, where=name)


@invariant("adapter")
def adding_an_adapter_leaves_the_training_one_trainable(port: Port) -> None:
    """Adding the adapter ``old`` changes nothing about which tensors train.

    PEFT makes the newest adapter the active, trainable one (peft #3580, #2759): an optimizer built before keeps stepping frozen tensors.
    """
    port.select_trainable("default")
    before = {name for name, parameter in port.trainable().items()}
    port.add_adapter("old", port.adapter)
    after = {name for name, parameter in port.trainable().items()}
    require(bool(before), got="nothing trains", want="the factors of default", where="before")
    require(
        after == before,
        got=f"{len(after)} tensors, {len(before - after)} lost, {len(after - before)} new",
        want=f"the same {len(before)}",
        where="after",
    )


@invariant("adapter", "objective", examples=2, case=cases(batch=(1, 1)))
def using_an_adapter_leaves_no_trace(port: Port, case: Case) -> None:
    """After ``using("old")`` and ``using(None)``, also when they end in an exception, the velocity and the trainable tensors are as before.

    Evaluation that forgets to switch back trains or samples the wrong policy from then on.
    """
    port.add_adapter("old", port.adapter)
    port.load_adapter("default", random_adapter(port, port.adapter, 1))
    port.load_adapter("old", random_adapter(port, port.adapter, 2))
    port.select_trainable("default")
    before, trainable = velocity(port, case), set(port.trainable())
    for name in ("old", None):
        try:
            with port.using(name):
                raise KeyError("evaluation failed")
        except KeyError:
            pass
        after = velocity(port, case)
        for modality in after:
            require_equal(after[modality], before[modality], where=f"{modality}, after using({name!r})")
        require(
            set(port.trainable()) == trainable, got=f"{len(port.trainable())} tensors train", want=f"{len(trainable)}", where=f"after using({name!r})"
        )


@invariant("adapter", "objective", examples=2, case=cases(batch=(1, 1)), seed=seeds)
def each_adapter_name_selects_its_own_weights(port: Port, case: Case, seed: int) -> None:
    """``default``, ``old`` and none give three different velocities, and exchanging the two states exchanges two of them.

    A rollout or reference that always uses the training adapter (UniRL #21), or the base instead of a warm start (trl #1340), is silent.
    """
    port.add_adapter("old", port.adapter)
    first, second = random_adapter(port, port.adapter, seed), random_adapter(port, port.adapter, seed + 1)
    outputs = []
    for default, old in ((first, second), (second, first)):
        port.load_adapter("default", default)
        port.load_adapter("old", old)
        with port.using("old"):
            with_old = velocity(port, case)
        with port.using("default"):
            with_default = velocity(port, case)
        with port.using(None):
            outputs.append((with_default, with_old, velocity(port, case)))
    (default_a, old_a, none_a), (default_b, old_b, none_b) = outputs
    for modality in port.modalities:
        require_equal(old_b[modality], default_a[modality], where=f"{modality}, states exchanged")
        require_equal(default_b[modality], old_a[modality], where=f"{modality}, states exchanged")
        require_equal(none_b[modality], none_a[modality], where=f"{modality}, no adapter")
        for a, b, what in ((default_a, old_a, "default and old"), (default_a, none_a, "default and none"), (old_a, none_a, "old and none")):
            require_at_least(relative_error(a[modality], b[modality]), port.bound(float32=1e-3, bfloat16=3e-2), where=f"{modality}, {what} differ")


@invariant("adapter", examples=3, seed=seeds)
def a_loaded_state_comes_back_bit_for_bit(port: Port, seed: int) -> None:
    """What is loaded into ``default`` and ``old`` is what is read back from each: names, shapes and every bit, and reading gives copies.

    Hand-over and checkpoints both go through this pair. A state that aliases the live weights changes under the reader's hands.
    """
    if "old" not in port.adapter_names():
        port.add_adapter("old", port.adapter)
    # Numbers that the port's dtype holds exactly, in which adapters may be stored.
    drawn = {"default": random_adapter(port, port.adapter, seed), "old": random_adapter(port, port.adapter, seed + 1)}
    states = {adapter: {name: value.to(getattr(torch, port.dtype)).float() for name, value in state.items()} for adapter, state in drawn.items()}
    for adapter, state in states.items():
        port.load_adapter(adapter, state)
    for adapter, state in states.items():
        back = port.adapter_state(adapter)
        require(set(back) == set(state), got=sorted(set(back) ^ set(state))[:4], want="the same names", where=f"adapter {adapter}")
        for name, value in state.items():
            require_equal(back[name], value, where=f"{adapter}, {name}")
            back[name].zero_()
        again = port.adapter_state(adapter)
        for name, value in state.items():
            require_equal(again[name], value, where=f"{adapter}, {name}, after writing into the copy")


@invariant("adapter", "objective")
def adapter_strength_grows_with_b(port: Port) -> None:
    """Doubling B doubles a small adapter's effect on the velocity, to first order, in every modality.

    A saturated, clipped or cached adapter path breaks proportionality. Oracle: the derivative of a smooth function. Not covered: large adapters.
    """
    case = smallest(port, seed=4)
    state = scaled(random_adapter(port, port.adapter, 9), port.bound(float32=2e-3, bfloat16=0.1))
    with port.using(None):
        base = velocity(port, case)
    port.load_adapter("default", state)
    once = velocity(port, case)
    port.load_adapter("default", scaled(state, 2.0))
    twice = velocity(port, case)
    for modality in port.modalities:
        effect = once[modality] - base[modality]
        require_at_least(relative_error(once[modality], base[modality]), port.bound(float32=1e-5, bfloat16=1e-3), where=f"{modality}, effect")
        require_close(twice[modality] - base[modality], 2 * effect, bound=port.bound(float32=0.02, bfloat16=0.4), where=f"{modality}, doubled")


@invariant("adapter", "objective")
def the_gradient_is_the_derivative_of_the_velocity(port: Port) -> None:
    """For each modality and for A and B on their own, the gradient predicts how the velocity changes along random directions and along itself.

    A gradient can be reversed, scaled or partly lost (a hook, a detached branch, a custom backward) while every value is right; the optimizer then
    walks elsewhere. Oracle: central differences of the velocity itself, in float64 sums.
    """
    case = smallest(port, seed=14, prompts=("rain",), given=max(port.givens, key=len))
    port.load_adapter("default", random_adapter(port, port.adapter, 71))
    port.select_trainable("default")
    call = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    weights = case.normal("weights", port.shapes(case))
    parameters = port.trainable()
    bound = port.bound(float32=0.04, bfloat16=0.4)
    generator = case.generator("directions")
    worst: Violation | None = None
    for modality in port.modalities:
        value = port.predict_velocity(*call)[modality].double()
        loss = (value * weights[modality].to(value)).sum()
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True))
        for factor in ("lora_A", "lora_B"):
            chosen = [name for name in parameters if factor in name]
            gradient = {n: torch.zeros_like(parameters[n]) if gradients[n] is None else gradients[n] for n in chosen}
            size = sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5
            require_at_least(size, 1e-12, where=f"{modality}, {factor}, size of the gradient")
            random = [{n: torch.randn(parameters[n].shape, generator=generator).to(parameters[n]) for n in chosen} for _ in range(2)]
            for kind, direction in [("random", r) for r in random] + [("its own", gradient)]:
                length = sum(float(d.double().square().sum()) for d in direction.values()) ** 0.5
                reach = sum(float(parameters[n].detach().double().square().sum()) for n in chosen) ** 0.5
                # Curvature is a quarter of a per cent in float32, rounding less; both are about a tenth in bfloat16. Along itself it bends early.
                step = port.bound(float32=0.0005, bfloat16=0.003 if kind == "its own" else 0.1) * reach / length
                slope, predicted = _slopes(port, call, weights, modality, {n: parameters[n] for n in chosen}, direction, gradient, step)
                # What a random direction of this length would give on average; along the gradient itself it is the slope.
                expected = max(abs(predicted), size * length / sum(d.numel() for d in direction.values()) ** 0.5)
                error, where = abs(slope - predicted) / expected, f"{modality}, {factor}, {kind} direction"
                note(error, bound, where)
                if not error <= bound and (worst is None or error > float(worst.got)):  # type: ignore[arg-type]
                    worst = Violation(error, f"slope {slope:.4g} as the gradient's {predicted:.4g}", bound, where)
    if worst is not None:
        raise worst


@torch.no_grad()
def _slopes(
    port: Port, call: tuple, weights: dict, modality: str, parameters: dict, direction: dict, gradient: dict, step: float
) -> tuple[float, float]:
    """Central difference of the weighted velocity of one modality along a direction, and what a gradient predicts for the way that was gone: in
    bfloat16 the parameters go where they can be rounded to."""
    kept, values, predicted = {name: parameter.clone() for name, parameter in parameters.items()}, [], 0.0
    for sign in (1, -1):
        for name, parameter in parameters.items():
            parameter.add_(direction[name], alpha=sign * step)
            predicted += sign * float(((parameter.double() - kept[name].double()) * gradient[name].double()).sum())
        out = port.predict_velocity(*call)[modality]
        values.append(float((out.double().cpu() * weights[modality].double()).sum()))
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return (values[0] - values[1]) / (2 * step), predicted / (2 * step)
