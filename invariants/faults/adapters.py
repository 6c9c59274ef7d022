"""The actor's LoRA broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace as with_fields
from typing import Any

from loudfail.harness import inject
from loudfail.harness.port import AdapterConfig, Port, base_parameters, random_adapter
from loudfail.harness.registry import fault


@contextmanager
def mended(port: Port) -> Iterator[None]:
    """A healthy ``default`` after everything inside has been undone."""
    try:
        yield
    finally:
        port.add_adapter("default", port.adapter)
        port.select_trainable("default")


def no_module(port: Port) -> str:
    from torch.nn import Module

    return "" if isinstance(getattr(port, "actor", None), Module) else "it shows no module that trains, as `actor`"


def no_peft(port: Port) -> str:
    from peft.tuners.lora import LoraLayer

    return no_module(port) or ("" if any(isinstance(module, LoraLayer) for module in port.actor.modules()) else "its adapters are not PEFT's")


def one_target(port: Port) -> str:
    """Why no target can be left out."""
    targets = port.adapter.targets
    return fixed_targets(port, targets[:-1]) if len(targets) > 1 else f"it configures {'one target' if targets else 'no targets'}"


def fixed_targets(port: Port, others: tuple[str, ...]) -> str:
    """Why these targets make no other adapter than its own do."""
    with mended(port):
        before = set(port.adapter_state("default"))
        try:
            port.add_adapter("default", with_fields(port.adapter, targets=others))
        except Exception as error:
            return f"it refuses other targets than its own: {type(error).__name__}"
        return "it adapts the same projections whatever targets are configured" if set(port.adapter_state("default")) == before else ""


def fixed_base(port: Port) -> str:
    """Why a base weight cannot be made to train."""
    if why := no_module(port):
        return why
    one = next((p for p in base_parameters(port).values() if p.is_floating_point()), None)
    if one is None:
        return "its actor has no parameter but those of adapters"
    one.requires_grad_(True)
    try:
        return "" if any(p is one for p in port.trainable().values()) else "its trainable() names adapters only, whatever requires a gradient"
    finally:
        one.requires_grad_(False)


def no_equals(port: Port) -> str:
    """Why no projection can be taken for another."""
    shapes = list(port.projections().values())
    return "" if len(set(shapes)) < len(shapes) else "no two of its projections have one shape"


@fault(
    "adapter",
    catches=["adapters::adding_an_adapter_leaves_the_training_one_trainable"],
    source="peft #3580, #2759, #1303",
    cause="another adapter trains",
)
def adding_old_makes_it_the_trainable_one(port: Port) -> Iterator[None]:
    """Adding ``old`` selects it, so that the optimizer steps a frozen adapter."""

    def make(original: Any) -> Any:
        def add_adapter(name: str, config: AdapterConfig) -> None:
            original(name, config)
            port.select_trainable(name)

        return add_adapter

    with mended(port), inject.replace(port, "add_adapter", make):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::the_scale_of_an_adapter_is_alpha_over_rank"],
    source="Tencent-Hunyuan/UniRL #155, #161",
    cause="LoRA scale missing",
)
def alpha_is_lost(port: Port) -> Iterator[None]:
    """The adapter is built with alpha = rank, so that its scale is 1."""
    with inject.replace(port, "add_adapter", lambda original: lambda name, config: original(name, with_fields(config, alpha=float(config.rank)))):
        yield


@fault("adapter", "objective", catches=["adapters::the_scale_of_an_adapter_is_alpha_over_rank"], cause="LoRA scale over root rank")
def the_scale_is_alpha_over_root_rank(port: Port) -> Iterator[None]:
    """Rank-stabilized scaling on one side only: alpha / sqrt(r) instead of alpha / r."""
    with inject.replace(
        port, "add_adapter", lambda original: lambda name, config: original(name, with_fields(config, alpha=config.alpha * config.rank**0.5))
    ):
        yield


@fault(
    "adapter",
    catches=["adapters::every_configured_projection_carries_lora_and_nothing_else_does"],
    source="verl-omni #658",
    unless=one_target,
    cause="projections without an adapter",
)
def one_target_gets_no_adapter(port: Port) -> Iterator[None]:
    """The last configured target is left out when the adapter is built."""
    with (
        mended(port),
        inject.replace(port, "add_adapter", lambda original: lambda name, config: original(name, with_fields(config, targets=config.targets[:-1]))),
    ):
        port.add_adapter("default", port.adapter)
        yield


def no_suffix(port: Port) -> str:
    """Why no target can match another linear too."""
    if not port.adapter.targets:
        return "it configures no targets"
    other = _other_linear(port)
    return fixed_targets(port, (*port.adapter.targets, other)) if other else "its targets match every linear of the actor"


def _other_linear(port: Port) -> str:
    """A linear of the actor that the configured targets do not match; empty if there is none."""
    import torch

    modules = dict(getattr(port, "actor", torch.nn.Module()).named_modules())
    names = [name.removesuffix(".weight") for name in port.base_state() if name.endswith(".weight")]
    free = [name for name in names if not name.endswith(port.adapter.targets) and isinstance(modules.get(name), torch.nn.Linear)]
    return free[0] if free else ""


@fault(
    "adapter",
    catches=["adapters::every_configured_projection_carries_lora_and_nothing_else_does"],
    source="bghira/SimpleTuner #2629",
    unless=no_suffix,
    cause="adapter on other modules",
)
def a_suffix_catches_modules_that_the_rollout_does_not_know(port: Port) -> Iterator[None]:
    """A target suffix also matches a module outside the blocks, whose adapter no rollout knows."""
    outside = _other_linear(port)
    extra = lambda original: lambda name, config: original(name, with_fields(config, targets=(*config.targets, outside)))  # noqa: E731
    with mended(port), inject.replace(port, "add_adapter", extra):
        port.add_adapter("default", port.adapter)
        yield


@fault("adapter", catches=["adapters::both_factors_have_the_configured_rank"], cause="rank ignored")
def the_configured_rank_is_ignored(port: Port) -> Iterator[None]:
    """Every adapter is built with a rank of 8."""
    with mended(port), inject.replace(port, "add_adapter", lambda original: lambda name, config: original(name, with_fields(config, rank=8))):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::a_new_adapter_changes_nothing"],
    source="verl-omni commit 786dd36c (warm start)",
    cause="new adapter starts warm",
)
def a_new_adapter_starts_warm(port: Port) -> Iterator[None]:
    """A fresh adapter holds the weights of an earlier run."""

    def make(original: Any) -> Any:
        def add_adapter(name: str, config: AdapterConfig) -> None:
            original(name, config)
            port.load_adapter(name, random_adapter(port, config, 1))

        return add_adapter

    with mended(port), inject.replace(port, "add_adapter", make):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::every_projection_moves_the_velocity", "adapters::adapter_strength_grows_with_b"],
    source="vllm #39278",
    unless=no_peft,
    cause="adapter without effect",
)
def lora_layers_return_the_base_output(port: Port) -> Iterator[None]:
    """PEFT's linear layer returns its base layer's output: the adapter is registered and applied to nothing."""
    from peft.tuners.lora.layer import Linear

    with inject.replace(Linear, "forward", lambda original: lambda self, x, *args, **kwargs: self.base_layer(x)):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::every_projection_moves_the_velocity"],
    source="verl-omni #658",
    unless=no_peft,
    cause="projections without effect",
)
def lora_of_one_shape_is_skipped(port: Port) -> Iterator[None]:
    """PEFT's linear layer skips its adapter in the widest projection."""
    from peft.tuners.lora.layer import Linear

    widest = max(out for out, _ in port.projections().values())

    def make(original: Any) -> Any:
        return lambda self, x, *args, **kwargs: self.base_layer(x) if self.base_layer.out_features == widest else original(self, x, *args, **kwargs)

    with inject.replace(Linear, "forward", make):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::every_trainable_factor_gets_a_gradient_and_nothing_else_does"],
    source="huggingface/trl #3926, diffusers #11832",
    unless=fixed_base,
    cause="base weights train",
)
def a_base_weight_trains_too(port: Port) -> Iterator[None]:
    """Selecting the adapter leaves one base weight trainable."""
    one = next(p for p in base_parameters(port).values() if p.is_floating_point())

    def make(original: Any) -> Any:
        def select_trainable(name: str) -> None:
            original(name)
            one.requires_grad_(True)

        return select_trainable

    with mended(port), inject.replace(port, "select_trainable", make):
        yield
    one.requires_grad_(False)


@fault(
    "adapter",
    "objective",
    catches=["adapters::every_trainable_factor_gets_a_gradient_and_nothing_else_does"],
    source="Flow-Factory commit 8bc04d0 (#123)",
    cause="no gradient",
)
def the_policy_is_called_without_a_graph(port: Port) -> Iterator[None]:
    """The policy's forward pass runs in a no-grad block."""
    import torch

    with inject.replace(port, "predict_velocity", lambda original: torch.no_grad()(original)):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::every_trainable_factor_gets_a_gradient_and_nothing_else_does"],
    source="cloneofsimo/lora #26",
    unless=no_peft,
    cause="projections without a gradient",
)
def one_projection_is_detached(port: Port) -> Iterator[None]:
    """The gradient stops at one projection's LoRA branch, as re-entrant checkpointing does with inputs that need none."""
    from peft.tuners.lora.layer import Linear

    widest = max(out for out, _ in port.projections().values())

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, x, *args, **kwargs)
            base = self.base_layer(x)
            return base + (out - base).detach() if self.base_layer.out_features == widest else out

        return forward

    with inject.replace(Linear, "forward", make):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::using_an_adapter_leaves_no_trace"],
    source="diffusers #7048, StableTuner #126",
    unless=no_module,
    cause="adapter not switched back",
)
def evaluation_does_not_switch_back(port: Port) -> Iterator[None]:
    """After an evaluation that failed, the adapter it used stays in use."""

    kept = []  # a context that is garbage-collected is left, so the broken code's contexts are kept

    def make(original: Any) -> Any:
        @contextmanager
        def using(name: str | None) -> Iterator[None]:
            context = original(name)
            kept.append(context)
            context.__enter__()
            yield  # an exception passes by without leaving the context
            context.__exit__(None, None, None)

        return using

    with mended(port), inject.replace(port, "using", make):
        yield
    if switch := getattr(port.actor, "enable_adapters", None):  # a Diffusers model
        switch()


@fault(
    "adapter",
    "objective",
    "engine",
    catches=["adapters::each_adapter_name_selects_its_own_weights", "rollout::velocity_replay_agrees_at_every_step"],
    source="Tencent-Hunyuan/UniRL PR #21",
    cause="one adapter for all",
)
def the_old_policy_is_the_training_one(port: Port) -> Iterator[None]:
    """Asking for ``old`` uses the adapter that trains."""
    with inject.replace(port, "using", lambda original: lambda name: original("default" if name == "old" else name)):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::each_adapter_name_selects_its_own_weights"],
    source="huggingface/trl #1340, #4723",
    cause="reference keeps the adapter",
)
def the_reference_keeps_the_adapter(port: Port) -> Iterator[None]:
    """Asking for the base model leaves the adapter on."""
    with inject.replace(port, "using", lambda original: lambda name: nullcontext() if name is None else original(name)):
        yield


@fault("adapter", catches=["adapters::a_loaded_state_comes_back_bit_for_bit"], source="pytorch #149205", cause="stale adapter state")
def the_state_is_read_once_and_cached(port: Port) -> Iterator[None]:
    """Reading an adapter gives what was read the first time."""
    seen: dict[str, Any] = {}
    with inject.replace(port, "adapter_state", lambda original: lambda name: seen.setdefault(name, original(name))):
        yield


@fault("adapter", catches=["adapters::a_loaded_state_comes_back_bit_for_bit"], unless=no_equals, cause="another projection's adapter")
def loading_swaps_key_and_value(port: Port) -> Iterator[None]:
    """The states of two projections of one shape are exchanged when an adapter is loaded."""

    def make(original: Any) -> Any:
        def load_adapter(name: str, state: dict[str, Any]) -> None:
            by_shape: dict[tuple[int, int], list[str]] = {}
            for projection, shape in port.projections().items():
                by_shape.setdefault(shape, []).append(projection)
            a, b = next(names for names in by_shape.values() if len(names) > 1)[:2]
            rename = {a: b, b: a}
            original(name, {f"{rename.get(p, p)}.lora_{f}": v for key, v in state.items() for p, _, f in [key.partition(".lora_")]})

        return load_adapter

    with inject.replace(port, "load_adapter", make):
        yield


@fault(
    "adapter",
    "objective",
    catches=["adapters::adapter_strength_grows_with_b", "adapters::a_loaded_state_comes_back_bit_for_bit"],
    source="vllm #42125",
    cause="second load ignored",
)
def a_second_load_is_ignored(port: Port) -> Iterator[None]:
    """Loading into an adapter that was loaded before does nothing."""
    loaded: set[str] = set()

    def make(original: Any) -> Any:
        def load_adapter(name: str, state: Any) -> None:
            if name not in loaded:
                original(name, state)
            loaded.add(name)

        return load_adapter

    with mended(port), inject.replace(port, "load_adapter", make):
        yield


@fault("adapter", "objective", catches=["adapters::using_an_adapter_leaves_no_trace"], source="huggingface/trl #3234, #3500", ports=["h3", "ltx2"])
def dropout_is_active(port: Port) -> Iterator[None]:
    """LoRA dropout is on and the model is in training mode, so that two calls differ."""
    import peft

    actor = port.actor

    def make(original: Any) -> Any:
        return lambda self, *args, **kwargs: original(self, *args, **(kwargs | {"lora_dropout": 0.5}))

    with mended(port), inject.replace(peft.LoraConfig, "__init__", make):
        port.add_adapter("default", port.adapter)
        actor.train()
        try:
            yield
        finally:
            actor.eval()


GRADIENT = "adapters::the_gradient_is_the_derivative_of_the_velocity"


def _gradient_times(port: Port, factor: float) -> Any:
    """The last modality's velocity with its value right and its gradient multiplied."""

    def make(original: Any) -> Any:
        def predict_velocity(*args: Any) -> Any:
            result = dict(original(*args))
            value = result[port.modalities[-1]]
            result[port.modalities[-1]] = factor * value + (1 - factor) * value.detach()
            return result

        return predict_velocity

    return inject.replace(port, "predict_velocity", make)


@fault("adapter", "objective", catches=[GRADIENT], source="primepake/splitmeanflow #2", cause="gradient reversed")
def one_modalitys_gradient_is_reversed(port: Port) -> Iterator[None]:
    """The last modality's values are right and its gradient has the other sign."""
    with _gradient_times(port, -1.0):
        yield


@fault("adapter", "objective", catches=[GRADIENT], source="Lightricks/LTX-2 #94", cause="gradient scaled")
def one_modalitys_gradient_is_ten_times_too_large(port: Port) -> Iterator[None]:
    """The last modality's values are right and its gradient is ten times as large."""
    with _gradient_times(port, 10.0):
        yield


@fault("adapter", "objective", catches=[GRADIENT], source="diffusers #14274", cause="gradient reversed")
def the_gradient_of_a_is_reversed(port: Port) -> Iterator[None]:
    """A hook reverses the gradient of every A factor on its way to the optimizer's tensors."""
    import torch

    handles = [p.register_hook(torch.neg) for n, p in port.trainable().items() if "lora_A" in n]
    try:
        with inject.replace(port, "trainable", lambda original: original):  # counts that the hooked tensors were asked for
            yield
    finally:
        for handle in handles:
            handle.remove()


@fault(
    "adapter",
    catches=["adapters::a_loaded_state_comes_back_bit_for_bit"],
    source="Tencent-Hunyuan/UniRL PR #21; verl-omni #608",
    cause="one adapter for all",
)
def reading_old_gives_the_training_adapter(port: Port) -> Iterator[None]:
    """Reading the state of ``old`` gives that of ``default``."""
    with inject.replace(port, "adapter_state", lambda original: lambda name: original("default" if name == "old" else name)):
        yield
