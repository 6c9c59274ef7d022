"""The way from the actor to the rollout broken on purpose, mostly inside the ranks and in upstream's own classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault

REACHES = "sync::every_projection_reaches_the_rollout"
BOUND = "sync::every_adapter_tensor_is_registered_and_bound"
BASE = "sync::every_base_weight_arrives"
NEWEST = "sync::the_newest_hand_over_is_the_one_in_effect"
ASIDE = "sync::a_request_without_the_adapter_between_two_with_it_gets_the_base_model"
EFFECT = "rollout::the_adapters_effect_is_the_actors"
REPLAY = "rollout::velocity_replay_agrees_at_every_step"
VELOCITY = "rollout::the_base_velocity_is_the_actors"


# -- upstream's LoRA layers and manager -----------------------------------------------------------------------------------------------------


def fused(port: Port) -> str:
    """Why the ranks of its engine have none of the parts that these break."""
    return "" if hasattr(port, "fused") else "its engine is none of a fused model that Loudfail hands over to"


def _packed_layers() -> type:
    from vllm_omni.diffusion.lora.layers import DiffusionMergedColumnParallelLinearWithLoRA

    return DiffusionMergedColumnParallelLinearWithLoRA


def _layers() -> type:
    from vllm_omni.diffusion.lora.layers.base_linear import DiffusionBaseLinearLayerWithLoRA

    return DiffusionBaseLinearLayerWithLoRA


def _manager() -> type:
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    return DiffusionLoRAManager


def packed_lora_is_not_set() -> Any:
    return inject.replace(
        _packed_layers(), "set_lora", lambda original: lambda self, *args, **kwargs: None if self.tp_size > 1 else original(self, *args, **kwargs)
    )


@fault(
    "adapter",
    "engine",
    catches=[BOUND, REACHES, EFFECT, REPLAY],
    source="verl-omni commit 786dd36c; vllm-omni 0.28.0",
    degrees=(2, 4),
    ports=["h3"],
    cause="projections missing",
)
def fc1_lora_is_skipped_when_sharded(port: Port) -> Iterator[None]:
    """At tensor parallel ≥ 2 the fused fc1 layer ignores its adapter; at 1 everything is right."""
    with inject.in_ranks(port, packed_lora_is_not_set):
        yield


def packed_lora_is_not_applied() -> Any:
    def make(original: Any) -> Any:
        def apply(self: Any, x: Any, bias: Any = None) -> Any:
            if getattr(self, "n_slices", 1) == 2 and self.tp_size > 1:
                return self.base_layer.quant_method.apply(self.base_layer, x, bias)
            return original(self, x, bias)

        return apply

    return inject.replace(_layers(), "apply", make)


@fault(
    "adapter",
    "engine",
    catches=[REACHES, EFFECT, REPLAY],
    source="verl-omni commit 786dd36c; vllm-omni #7190",
    degrees=(2, 4),
    ports=["h3"],
    cause="projections missing",
)
def fc1_lora_is_bound_and_not_applied_when_sharded(port: Port) -> Iterator[None]:
    """At tensor parallel ≥ 2 the fused fc1 layer holds its adapter, counts as bound, and computes without it."""
    with inject.in_ranks(port, packed_lora_is_not_applied):
        yield


def nothing_is_bound() -> Any:
    return inject.replace(_manager(), "_bind_adapter_weights", lambda original: lambda self, model, scale: None)


@fault(
    "adapter",
    "engine",
    catches=[BOUND, REACHES, EFFECT, REPLAY],
    source="verl-omni commit 786dd36c; vllm #39278; vllm-omni #7190",
    unless=fused,
    cause="adapter missing",
)
def the_adapter_registers_and_binds_to_nothing(port: Port) -> Iterator[None]:
    """The manager registers and activates the adapter and binds it to no layer, as releases before 0.30 did when no name matched."""
    with inject.in_ranks(port, nothing_is_bound):
        yield


def slices_of_rank_zero() -> Any:
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    def make(original: Any) -> Any:
        def slice_lora_b(self: Any, lora_b: Any) -> Any:
            return [None if b is None else b[:size] for b, size in zip(lora_b, self.output_slices, strict=True)]

        return slice_lora_b

    return inject.replace(MergedColumnParallelLinearWithLoRA, "slice_lora_b", make)


@fault(
    "adapter", "engine", catches=[REACHES, EFFECT], source="vllm #45691, #45715", degrees=(2, 4), unless=fused, cause="first rank's rows everywhere"
)
def every_rank_takes_the_first_shard(port: Port) -> Iterator[None]:
    """Fused column-parallel layers cut rank 0's rows out of B in every rank."""
    with inject.in_ranks(port, slices_of_rank_zero):
        yield


def contiguous_chunk() -> Any:
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    def make(original: Any) -> Any:
        def slice_lora_b(self: Any, lora_b: Any) -> Any:
            if any(b is None for b in lora_b):
                return original(self, lora_b)
            whole = torch.cat(list(lora_b), dim=0).chunk(self.tp_size)[self.tp_rank]
            return list(whole.split(list(self.output_slices)))

        return slice_lora_b

    return inject.replace(MergedColumnParallelLinearWithLoRA, "slice_lora_b", make)


@fault(
    "adapter",
    "engine",
    catches=[REACHES, EFFECT],
    source="own, from verl-omni commit 786dd36c",
    degrees=(2, 4),
    unless=fused,
    cause="fused rows cut as one block",
)
def fused_rows_are_cut_as_one_block(port: Port) -> Iterator[None]:
    """A fused B is cut into consecutive blocks of rows, so that rank 0 gets all of the first part and the last rank all of the last."""
    with inject.in_ranks(port, contiguous_chunk):
        yield


def row_partials_of_rank_zero() -> Any:
    def make(original: Any) -> Any:
        def apply(self: Any, x: Any, bias: Any = None) -> Any:
            from vllm.model_executor.layers.linear import RowParallelLinear

            if isinstance(self.base_layer, RowParallelLinear) and self.tp_rank > 0:
                return self.base_layer.quant_method.apply(self.base_layer, x, bias)
            return original(self, x, bias)

        return apply

    return inject.replace(_layers(), "apply", make)


@fault("adapter", "engine", catches=[REACHES, EFFECT], degrees=(2, 4), unless=fused, cause="one rank's part")
def row_parallel_lora_misses_the_other_ranks(port: Port) -> Iterator[None]:
    """Row-parallel layers add their adapter's partial sum in rank 0 only."""
    with inject.in_ranks(port, row_partials_of_rank_zero):
        yield


def last_rank_binds_once() -> Any:
    def make(original: Any) -> Any:
        def bind(self: Any, model: Any, scale: float) -> None:
            import torch.distributed as dist

            if dist.get_rank() == dist.get_world_size() - 1 and getattr(self, "_bound_once", False):
                return
            self._bound_once = True
            original(self, model, scale)

        return bind

    return inject.replace(_manager(), "_bind_adapter_weights", make)


@fault(
    "adapter",
    "engine",
    catches=[NEWEST],
    source="verl-omni commit 902d56fa (#349)",
    degrees=(2, 4),
    unless=fused,
    cause="one rank has a stale adapter",
)
def one_rank_keeps_the_old_adapter(port: Port) -> Iterator[None]:
    """The last rank keeps the first adapter it got."""
    with inject.in_ranks(port, last_rank_binds_once):
        yield


def mask_stays_on() -> Any:
    return inject.replace(_layers(), "suspend_lora", lambda original: lambda self: None)


@fault("adapter", "engine", "objective", catches=[ASIDE], unless=fused, cause="adapter set aside goes on")
def an_adapter_that_is_set_aside_goes_on_acting(port: Port) -> Iterator[None]:
    """A request without an adapter names none as active, and the layers add the last one's."""
    with inject.in_ranks(port, mask_stays_on):
        yield


def mask_stays_off() -> Any:
    return inject.replace(_layers(), "resume_lora", lambda original: lambda self: None)


@fault("adapter", "engine", "objective", catches=[ASIDE], unless=fused, cause="adapter set aside stays off")
def an_adapter_that_was_set_aside_does_not_come_back(port: Port) -> Iterator[None]:
    """After a request without an adapter the manager names it as active again, and no layer adds it."""
    with inject.in_ranks(port, mask_stays_off):
        yield


def scale_is_not_merged() -> Any:
    from vllm.lora.lora_weights import LoRALayerWeights

    return inject.replace(LoRALayerWeights, "optimize", lambda original: lambda self: self)


@fault("adapter", "engine", catches=[REACHES, EFFECT, REPLAY], source="Tencent-Hunyuan/UniRL #155, #161", unless=fused, cause="LoRA scale missing")
def the_rollout_loses_alpha_over_rank(port: Port) -> Iterator[None]:
    """The engine uses B A without alpha / r."""
    with inject.in_ranks(port, scale_is_not_merged):
        yield


def scale_is_merged_twice() -> Any:
    from vllm.lora.lora_weights import LoRALayerWeights

    def make(original: Any) -> Any:
        def optimize(self: Any) -> Any:
            scaling = self.scaling
            original(self)
            self.lora_b.mul_(scaling)
            return self

        return optimize

    return inject.replace(LoRALayerWeights, "optimize", make)


@fault("adapter", "engine", catches=[REACHES, EFFECT], unless=fused, cause="LoRA scale squared")
def the_rollout_applies_the_scale_twice(port: Port) -> Iterator[None]:
    """The engine multiplies B by alpha / r twice."""
    with inject.in_ranks(port, scale_is_merged_twice):
        yield


def only_the_first_binds() -> Any:
    def make(original: Any) -> Any:
        def bind(self: Any, model: Any, scale: float) -> None:
            if not getattr(self, "_bound_once", False):
                original(self, model, scale)
            self._bound_once = True

        return bind

    return inject.replace(_manager(), "_bind_adapter_weights", make)


@fault("adapter", "engine", catches=[NEWEST], source="vllm #42125, #48297; verl #7495", unless=fused)
def the_second_hand_over_changes_nothing(port: Port) -> Iterator[None]:
    """The engine reports the new version and keeps the first adapter's weights."""
    with inject.in_ranks(port, only_the_first_binds):
        yield


def first_adapter_stays_active() -> Any:
    def make(original: Any) -> Any:
        def activate(self: Any, adapter_id: int, scale: float) -> None:
            if self._active_adapter_id is None:
                original(self, adapter_id, scale)

        return activate

    return inject.replace(_manager(), "_activate_adapter", make)


@fault("adapter", "engine", catches=[NEWEST], source="vllm #42125", unless=fused, cause="second hand-over lost")
def a_new_adapter_is_not_activated(port: Port) -> Iterator[None]:
    """A second adapter is registered, and the first stays active."""

    with inject.in_ranks(port, first_adapter_stays_active):
        yield


def known_adapters_are_forgotten() -> Any:
    return inject.replace(_manager(), "list_adapters", lambda original: lambda self: [])


@fault(
    "adapter",
    "engine",
    catches=["sync::a_reused_version_is_refused_or_takes_effect"],
    source="vllm #42125; vllm-omni 0.30.0 add_adapter",
    unless=fused,
    cause="hand-over under a known version ignored",
)
def a_known_version_is_silently_kept(port: Port) -> Iterator[None]:
    """Other weights under a known id are skipped without a word, as vLLM-Omni's manager does."""
    with inject.in_ranks(port, known_adapters_are_forgotten):
        yield


def buffers_are_not_cleared() -> Any:
    def make(original: Any) -> Any:
        def reset_lora(self: Any, index: int) -> None:
            self._diffusion_lora_suspended_slices = None

        return reset_lora

    return inject.replace(_layers(), "reset_lora", make)


@fault("adapter", "engine", catches=[NEWEST], unless=fused, cause="rows of a larger rank stay")
def a_smaller_rank_leaves_rows_of_a_larger_one(port: Port) -> Iterator[None]:
    """Buffers keep what an adapter of larger rank left in them."""
    with inject.in_ranks(port, buffers_are_not_cleared):
        yield


def deactivation_only_forgets() -> Any:
    def make(original: Any) -> Any:
        def deactivate(self: Any) -> None:
            self._active_adapter_id = None

        return deactivate

    return inject.replace(_manager(), "_deactivate_all_adapters", make)


@fault(
    "adapter", "engine", "objective", catches=["sync::removing_the_adapter_gives_the_base_model_back"], unless=fused, cause="removed adapter stays"
)
def a_removed_adapter_keeps_acting(port: Port) -> Iterator[None]:
    """Removal clears the name and leaves the weights in the layers."""
    with inject.in_ranks(port, deactivation_only_forgets, rebuild=True):
        yield


def manager_starts_with_the_last_id() -> Any:
    @contextmanager
    def both() -> Iterator[inject.Fired]:
        last: dict[str, int | None] = {"id": None}

        def remember(original: Any) -> Any:
            def activate(self: Any, adapter_id: int, scale: float) -> None:
                original(self, adapter_id, scale)
                last["id"] = adapter_id

            return activate

        def start(original: Any) -> Any:
            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                self._active_adapter_id = last["id"]

            return init

        with inject.replace(_manager(), "_activate_adapter", remember) as fired, inject.replace(_manager(), "__init__", start):
            yield fired

    return both()


@fault(
    "adapter",
    "engine",
    catches=["sync::a_base_reload_does_not_leave_a_phantom_adapter"],
    source="verl #3516, #3541",
    unless=fused,
    cause="adapter lost in a base reload",
)
def the_adapter_is_lost_in_a_base_reload(port: Port) -> Iterator[None]:
    """A base reload drops the adapter's weights while the engine still names it as active."""
    with inject.in_ranks(port, manager_starts_with_the_last_id):
        yield


# -- what an integration writes: names, layouts, hand-over ------------------------------------------------------------------------------------


@fault(
    "adapter",
    "engine",
    catches=["sync::a_hand_over_leaves_the_trainers_tensors_alone"],
    source="kvcache-ai/ktransformers #2147",
    cause="trainer's tensors changed",
)
def the_scale_is_merged_into_the_trainers_tensors(port: Port) -> Iterator[None]:
    """The hand-over multiplies the trainer's own B tensors by alpha / r in place and sends scale 1."""
    from loudfail.harness.port import AdapterConfig

    def make(original: Any) -> Any:
        def set_adapter(state: dict[str, torch.Tensor], config: AdapterConfig, version: int) -> Any:
            for name, value in state.items():
                if name.endswith("lora_B.weight"):
                    value.mul_(config.scale)
            return original(state, AdapterConfig(config.rank, float(config.rank), config.targets), version)

        return set_adapter

    with inject.in_engines(port, "set_adapter", make):
        yield


def adapted(port: Port, ending: str) -> str:
    """Why there is no projection of that ending in the adapter."""
    return fused(port) or ("" if any(name.endswith(ending) for name in port.projections()) else f"its adapter has no {ending}")


def no_queries(port: Port) -> str:
    return adapted(port, ".to_q")


def no_keys(port: Port) -> str:
    return adapted(port, ".to_k")


def no_output(port: Port) -> str:
    return adapted(port, ".to_out.0")


def model_of(port: Any) -> type:
    """The class of what says which fused model the port has."""
    return type(port.fused({key: value for key, value in dict(port.actor.config).items() if not key.startswith("_")}))


def _hand_over(model: type, change: Any) -> Any:
    """Patch a port's hand-over in a rank: ``change(parts)`` edits the result."""

    def make(original: Any) -> Any:
        def hand_over(self: Any, state: Any, config: Any, degree: int) -> Any:
            return change(original(self, state, config, degree))

        return hand_over

    return inject.replace(model, "hand_over", make)


def halves_swapped(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        other = {"fc1_0": "fc1_1", "fc1_1": "fc1_0"}
        return {f"{m.rsplit('.', 1)[0]}.{other.get(m.rsplit('.', 1)[1], m.rsplit('.', 1)[1])}": p for m, p in parts.items()}

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[REACHES, EFFECT, REPLAY], source="sglang #34940", ports=["h3"], cause="halves swapped")
def fc1_lora_halves_are_swapped(port: Port) -> Iterator[None]:
    """B of ff.net.0.proj goes over as [value; gate] although the engine's fc1 is [gate; value]."""
    with inject.in_ranks(port, halves_swapped, model_of(port)):
        yield


def output_projection_left_out(model: type) -> Any:
    return _hand_over(model, lambda parts: {m: p for m, p in parts.items() if not m.endswith((".out_proj", ".to_out.0"))})


@fault("adapter", "engine", catches=[BOUND, REACHES, EFFECT], source="verl-omni #658", unless=no_output, cause="projections missing")
def the_output_projection_is_not_handed_over(port: Port) -> Iterator[None]:
    """``to_out.0`` has no entry in the name map; the other projections bind."""
    with inject.in_ranks(port, output_projection_left_out, model_of(port), rebuild=True):
        yield


def refiner_left_out(model: type) -> Any:
    return _hand_over(model, lambda parts: {m: p for m, p in parts.items() if "token_refiner" not in m})


@fault("adapter", "engine", catches=[BOUND, REACHES, EFFECT], source="bghira/SimpleTuner #2629", ports=["h3"], cause="projections missing")
def the_refiners_lora_is_not_handed_over(port: Port) -> Iterator[None]:
    """The token refiner's blocks, which the suffix targets also match, are left out of the map."""
    with inject.in_ranks(port, refiner_left_out, model_of(port), rebuild=True):
        yield


def keys_and_values_swapped(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        return {m.replace(".to_k", ".to_x").replace(".to_v", ".to_k").replace(".to_x", ".to_v"): p for m, p in parts.items()}

    return _hand_over(model, change)


@fault(
    "adapter",
    "engine",
    catches=[REACHES, "sync::each_projection_alone_reaches_only_itself"],
    source="Tencent-Hunyuan/UniRL #296",
    unless=no_keys,
    cause="another projection's adapter",
)
def key_and_value_lora_are_swapped(port: Port) -> Iterator[None]:
    """The K and V slices of the fused projection get each other's adapter."""
    with inject.in_ranks(port, keys_and_values_swapped, model_of(port)):
        yield


def blocks_shifted(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        return {re.sub(r"^(transformer\.\w*blocks\.)([01])\.", lambda found: f"{found[1]}{1 - int(found[2])}.", m): p for m, p in parts.items()}

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[REACHES, EFFECT], unless=no_queries, cause="another projection's adapter")
def two_blocks_exchange_their_lora(port: Port) -> Iterator[None]:
    """The adapters of the first two blocks are exchanged; all names and shapes fit."""
    with inject.in_ranks(port, blocks_shifted, model_of(port)):
        yield


def rounded_to_bfloat16(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        for part in parts.values():
            part.a, part.b = [a.bfloat16().float() for a in part.a], [b.bfloat16().float() for b in part.b]
        return parts

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[REACHES, EFFECT], source="vllm-omni #2291", unless=fused, cause="LoRA rounded", exact=True)
def the_hand_over_rounds_to_bfloat16(port: Port) -> Iterator[None]:
    """The adapter crosses in bfloat16 although both sides run in float32."""
    with inject.in_ranks(port, rounded_to_bfloat16, model_of(port)):
        yield


def rows_of_one_projection_transposed(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        for module, part in parts.items():
            if module.endswith(".to_q"):
                part.b = [part.b[0].view(4, -1, part.b[0].shape[1]).transpose(0, 1).reshape(part.b[0].shape).contiguous()]
        return parts

    return _hand_over(model, change)


@fault(
    "adapter", "engine", catches=[REACHES, EFFECT], source="Tencent-Hunyuan/UniRL #296; vllm-omni #6756", unless=no_queries, cause="rows interleaved"
)
def query_lora_rows_are_interleaved(port: Port) -> Iterator[None]:
    """The rows of Q's B are interleaved over heads although the engine's rows are by blocks."""
    with inject.in_ranks(port, rows_of_one_projection_transposed, model_of(port)):
        yield


# -- base weights --------------------------------------------------------------------------------------------------------------------------------


def _load(model: type, change: Any) -> Any:
    """Patch a port's base load in a rank: ``change(state)`` edits the actor's state dict first."""
    return inject.replace(model, "load", lambda original: lambda self, module, state: original(self, module, change(dict(state))))


def base_halves_swapped(model: type) -> Any:
    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: torch.cat(v.chunk(2)[::-1]) if n.endswith("ff.net.0.proj.weight") else v for n, v in state.items()}

    return _load(model, change)


@fault("adapter", "engine", "objective", catches=[BASE, VELOCITY], source="sglang #34940, #36067", ports=["h3"], cause="halves swapped")
def the_base_fc1_halves_are_swapped(port: Port) -> Iterator[None]:
    """The base fc1 arrives as [value; gate]."""
    with inject.in_ranks(port, base_halves_swapped, model_of(port), rebuild=True):
        yield


def base_heads_interleaved(model: type) -> Any:
    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: v.view(4, -1, v.shape[1]).transpose(0, 1).reshape(v.shape) if n.endswith(".to_k.weight") else v for n, v in state.items()}

    return _load(model, change)


@fault("adapter", "engine", "objective", catches=[BASE, VELOCITY], source="sglang #36067; diffusers #14408", unless=fused, cause="rows interleaved")
def the_base_keys_are_interleaved_over_heads(port: Port) -> Iterator[None]:
    """A per-head reorder of a native layout is applied to weights that are already in blocks."""
    with inject.in_ranks(port, base_heads_interleaved, model_of(port), rebuild=True):
        yield


def audio_head_left_out(model: type) -> Any:
    return _load(model, lambda state: {n: torch.zeros_like(v) if n == "audio_proj_out.weight" else v for n, v in state.items()})


@fault("adapter", "engine", "objective", catches=[BASE, VELOCITY], source="verl #7495", ports=["h3", "ltx2"], cause="base weights missing")
def the_audio_head_is_not_loaded(port: Port) -> Iterator[None]:
    """The audio output head keeps its initial zeros."""
    with inject.in_ranks(port, audio_head_left_out, model_of(port), rebuild=True):
        yield


def rotary_table_zeroed() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    def make(original: Any) -> Any:
        def load_weights(self: Any, weights: Any) -> Any:
            loaded = original(self, weights)
            self.rope.inv_freq.zero_()
            return loaded

        return load_weights

    return inject.replace(MiniMaxH3DiTModel, "load_weights", make)


@fault(
    "adapter",
    "engine",
    "objective",
    catches=[BASE, VELOCITY],
    source="verl-omni commit 786dd36c (RoPE table)",
    ports=["h3"],
    cause="buffer not initialized",
)
def the_rotary_table_is_not_initialized(port: Port) -> Iterator[None]:
    """The engine's rotary frequencies, which the actor never sends, stay zero."""
    with inject.in_ranks(port, rotary_table_zeroed, rebuild=True):
        yield


RANKS = "sync::adapters_of_every_rank_and_alpha_reach_the_rollout"


def large_ranks_cut(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        for part in parts.values():
            part.a = [torch.cat([a[:64], torch.zeros_like(a[64:])]) for a in part.a]
        return parts

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[RANKS], source="verl #7327", unless=fused, cause="rank cut")
def ranks_above_64_lose_their_tail(port: Port) -> Iterator[None]:
    """What is above the sixty-fourth row of A does not arrive."""
    with inject.in_ranks(port, large_ranks_cut, model_of(port)):
        yield


def rank_32_halved(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        for part in parts.values():
            if part.a[0].shape[0] == 32:
                part.b = [b * 0.5 for b in part.b]
        return parts

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[RANKS], source="Tencent-Hunyuan/UniRL #155", unless=fused, cause="LoRA halved")
def one_rank_has_half_its_scale(port: Port) -> Iterator[None]:
    """Adapters of rank 32 act with half their strength; other ranks are right."""
    with inject.in_ranks(port, rank_32_halved, model_of(port)):
        yield


@fault("adapter", "engine", catches=["sync::a_second_base_load_takes_effect"], source="verl #7495, #3516", cause="base weights of the first load")
def the_first_base_weights_stay(port: Port) -> Iterator[None]:
    """Every later load of the base sends the weights of the first one."""
    first = dict(port.base_state())
    with inject.in_engines(port, "load_base", lambda original: lambda state: original(first)):
        yield


def norms_of_rank_zero() -> Any:
    from vllm_omni.diffusion.models.ltx2 import ltx2_transformer

    return inject.replace(ltx2_transformer, "get_tensor_model_parallel_rank", lambda original: lambda: 0)


@fault("adapter", "engine", "objective", catches=[BASE], source="vllm #45691", degrees=(2, 4), ports=["ltx2"], cause="first rank's rows everywhere")
def every_rank_has_the_first_ranks_norms(port: Port) -> Iterator[None]:
    """The norms over all heads, which upstream cuts by hand, hold rank 0's part in every rank."""
    with inject.in_ranks(port, norms_of_rank_zero, rebuild=True):
        yield


def norms_over_own_heads() -> Any:
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import TensorParallelRMSNorm

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            kept, self._all_reduce = self._all_reduce, lambda tensor: tensor.mul_(self.tp_size)
            try:
                return original(self, x)
            finally:
                self._all_reduce = kept

        return forward

    return inject.replace(TensorParallelRMSNorm, "forward", make)


@fault("adapter", "engine", "objective", catches=[VELOCITY], source="vllm-omni 0.30.0 ltx2_transformer", degrees=(2, 4), ports=["ltx2"])
def norms_see_their_own_heads_only(port: Port) -> Iterator[None]:
    """At tensor parallel >= 2 each rank normalizes queries and keys by the heads that it has, not by all."""
    with inject.in_ranks(port, norms_over_own_heads):
        yield


def streams_left_out(model: type) -> Any:
    return _hand_over(model, lambda parts: {m: p for m, p in parts.items() if "audio_to_video" not in m and "video_to_audio" not in m})


@fault("adapter", "engine", catches=[BOUND, REACHES, EFFECT], source="bghira/SimpleTuner #2629", ports=["ltx2"], cause="projections missing")
def the_attention_between_the_streams_is_not_handed_over(port: Port) -> Iterator[None]:
    """The adapters of the attention between video and audio have no entry in the name map."""
    with inject.in_ranks(port, streams_left_out, model_of(port), rebuild=True):
        yield


def streams_swapped(model: type) -> Any:
    def change(parts: dict[str, Any]) -> dict[str, Any]:
        other = {".attn1.to_k": ".attn1.to_q", ".attn1.to_q": ".attn1.to_k"}
        return {next((m.replace(a, b) for a, b in other.items() if m.endswith(a)), m): p for m, p in parts.items()}

    return _hand_over(model, change)


@fault("adapter", "engine", catches=[REACHES], source="Tencent-Hunyuan/UniRL #296", ports=["ltx2"], cause="another projection's adapter")
def query_and_key_slices_are_exchanged(port: Port) -> Iterator[None]:
    """In the fused self-attention, the only one that is, Q and K get each other's adapter."""
    with inject.in_ranks(port, streams_swapped, model_of(port)):
        yield
