"""vLLM-Omni as the rollout: a fused, tensor-parallel model in a `World`, with vLLM-Omni's own LoRA manager.

Everything that computes is upstream's: the fused model class, vLLM's parallel linears, ``DiffusionLoRAManager`` and its LoRA layers. What is ours
is the process group set-up, the hand-over of tensors in memory, and reading state back from the ranks.

What is specific to one model (its class, its names, its forward arguments) is a `FusedModel`, which the port provides.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from loudfail.harness.case import Case
from loudfail.harness.environment import use_exact_float32
from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Trajectory, probe
from loudfail.harness.violation import Unavailable, Violation
from loudfail.harness.world import Rank, World, preload

if TYPE_CHECKING:
    from torch import nn

#: What the server imports before ranks are forked.
PRELOAD = ("loudfail.harness.engines.vllm_omni_imports",)


#: vLLM-Omni's plainest attention backend, which every machine has.
PLAIN = "TORCH_SDPA"
#: Bytes of base weights up to which they go through the pipes.
_PIPE_LIMIT = 2**28


class FusedModel(Protocol):
    """What a port says of its fused model. Instances are sent to the ranks, so they hold plain data only."""

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Construct the engine's model class inside the current vLLM configuration, in ``dtype``."""

    def load(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Load the actor's state dict through the engine's own loader."""

    def hand_over(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, degree: int) -> dict[str, LoRAParts]:
        """Actor LoRA state → engine module name → its A and B parts (one a slice for fused layers)."""

    def actor_names(self, module: str, slices: int) -> list[str]:
        """Actor projection for each slice of an engine module; ``projection[a:b]`` for a part of one, as fractions of its rows in quarters of text
        such as ``ff.net.0.proj#1/2`` (second half)."""

    def packed_modules(self) -> dict[str, list[str]]:
        """Fused layer's leaf name → leaf names of its slices, for the manager's mapping."""

    def velocity(
        self, model: nn.Module, latents: dict[str, torch.Tensor], sigmas: dict[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        """One call in Loudfail's convention."""

    def rollout(self, model: nn.Module, noise: dict[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """The engine's own loop."""

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]: ...

    def buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What the engine computes itself and does not get from the actor, such as a rotary table."""
        return {}

    def sharded(self, parameter: str) -> bool:
        """Whether a parameter that belongs to no parallel linear is cut along its first axis nevertheless, such as a norm over all heads."""
        return False


@dataclass
class LoRAParts:
    """A and B of one engine module: one pair, or one a slice of a fused layer. Scale alpha / r is *not* folded in."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]


class VllmOmniRollout:
    """`loudfail.harness.port.Rollout` on vLLM-Omni.

    Args:
        model: what is specific to the model.
        degree: tensor-parallel degree; that many ranks.
        dtype: ``float32`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        threads: torch threads of each rank.
        attention: vLLM-Omni's name of an attention backend, such as ``TORCH_SDPA`` or ``FLASH_ATTN``.

    Raises:
        Unavailable: vllm or vllm-omni is not installed, or another attention backend than the one asked for would run.
        RankError: a rank failed while it was built.
    """

    def __init__(
        self,
        model: FusedModel,
        degree: int,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        attention: str = PLAIN,
        timeout: float | None = None,
    ) -> None:
        require_installed()
        self.model, self.degree, self.dtype, self.device, self.attention = model, degree, dtype, device, attention
        environment = _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "DIFFUSION_ATTENTION_BACKEND": attention}
        backend = collectives(degree, device).split(",")[0]
        preload(*PRELOAD)  # does nothing where the port was early
        self.world = World(degree, start, device=device, backend=backend, timeout=timeout, environment=environment)
        self.rebuild()

    def rebuild(self) -> None:
        """Build the model afresh in every rank, without weights and adapter: after a patch of upstream classes."""
        found = self.world.call(build, self.model, self.dtype, self.attention != PLAIN)[0]
        if isinstance(found, str):
            self.close()
            raise Unavailable(found)
        if others := sorted(found - {self.attention, self.attention.removeprefix("TORCH_")}):  # upstream falls back with a line in its log
            self.close()
            raise Unavailable(f"attention backend {self.attention} is not available on this machine; vLLM-Omni would run {', '.join(others)}")
        self._loaded = False

    def load_base(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._loaded:  # vLLM repacks weights after loading on a CPU, so a second load needs a fresh model
            self.rebuild()
        size = sum(value.numel() * value.element_size() for value in state.values())
        if size < _PIPE_LIMIT:
            self.world.call(load_base, dict(state))
        else:  # through a file that the ranks map, so that the weights are in memory once and not once a rank
            from safetensors.torch import save_file

            with tempfile.TemporaryDirectory(prefix="loudfail-base-") as folder:
                file = os.path.join(folder, "base.safetensors")
                save_file({name: value.contiguous() for name, value in state.items()}, file)
                self.world.call(load_base, file)
        self._loaded = True

    def base_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        response = self._reassemble(self.world.call(base_response, count, seed))
        buffers = self.world.call(read_buffers)
        for name, value in buffers[0].items():
            for rank, other in enumerate(buffers[1:], 1):
                if not torch.equal(value, other[name]):
                    raise Violation(f"rank {rank} differs from rank 0", "the same in every rank", 0, f"buffer {name}")
            response[f"buffer:{name}"] = value
        return response

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
        reports = self.world.call(set_adapter, dict(state), config, version)
        if any(report != reports[0] for report in reports):
            raise Violation(str(reports), "the same in every rank", 0, "what the ranks bound")
        return reports[0]

    def remove_adapter(self) -> None:
        self.world.call(remove_adapter)

    def suspend_adapter(self) -> None:
        """As a request without an adapter leaves it: registered, and not active; `resume_adapter` makes it active again."""
        self.world.call(suspend_adapter)

    def resume_adapter(self, version: int) -> None:
        self.world.call(resume_adapter, version)

    def adapter_version(self) -> int | None:
        versions = self.world.call(adapter_version)
        if any(version != versions[0] for version in versions):
            raise Violation(str(versions), "the same in every rank", 0, "active adapter version")
        return versions[0]

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        return self._reassemble(self.world.call(delta_response, count, seed))

    def velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        return self.replicated(latents, sigmas, conditions)[0]

    def replicated(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> list[dict[str, torch.Tensor]]:
        return self.world.call(velocity, dict(latents), dict(sigmas), list(conditions))

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        return self.world.call(rollout, dict(noise), calls, list(conditions))[0]

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return self.world.call(grid, calls, case)[0]

    def classes(self) -> list[str]:
        return self.world.call(classes)[0]

    def patch(self, enter: Callable[[Any], AbstractContextManager[Any]], argument: Any = None) -> None:
        """Enter a module-level context manager function in every rank; `unpatch` leaves it. For faults in upstream classes."""
        self.world.call(enter_patch, enter, argument)

    def unpatch(self) -> int:
        """Leave all patches; how often they fired, summed over ranks."""
        return sum(self.world.call(leave_patches))

    def close(self) -> None:
        self.world.close()

    def _reassemble(self, ranks: list[dict[str, Shard]]) -> dict[str, torch.Tensor]:
        """Shards of all ranks → full tensors under the actor's names."""
        full: dict[str, torch.Tensor] = {}
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name in ranks[0]:
            shards = [rank[name] for rank in ranks]
            for index, slices in enumerate(zip(*(shard.slices for shard in shards), strict=True)):
                if shards[0].join == "columns":
                    whole = torch.cat(slices, dim=0)
                elif shards[0].join == "rows":
                    whole = torch.cat(slices, dim=1)
                elif shards[0].join == "sum":
                    whole = torch.stack(slices).sum(dim=0)
                else:
                    for rank, piece in enumerate(slices[1:], 1):
                        if not torch.equal(piece, slices[0]):
                            raise Violation(f"rank {rank} differs from rank 0", "the same in every rank", 0, name)
                    whole = slices[0]
                module, _, leaf = name.rpartition(".")
                if leaf not in ("weight", "bias", "delta"):  # a parameter that is a table of its module's own
                    full[name] = whole
                    continue
                target, _, place = self.model.actor_names(module, len(shards[0].slices))[index].partition("#")
                key = f"{target}.{leaf}" if leaf != "delta" else target
                if place:
                    half, of = map(int, place.split("/"))
                    parts.setdefault(f"{key}#{of}", {})[half] = whole
                else:
                    full[key] = whole
        for key, pieces in parts.items():
            name, _, count = key.partition("#")
            if sorted(pieces) != list(range(int(count))):
                raise RuntimeError(f"{name}: parts {sorted(pieces)} of {count} came back")
            full[name] = torch.cat([pieces[i] for i in range(int(count))], dim=0)
        return full


def collectives(degree: int, device: str) -> str:
    """What ranks of a tensor-parallel degree talk through: ``nccl`` with a GPU for each, ``gloo, shared device`` with fewer GPUs than ranks, or
    ``gloo, sums through pipes`` on a CPU."""
    if device != "cuda":
        return "gloo, sums through pipes"
    return "nccl" if torch.cuda.device_count() >= degree else "gloo, shared device"


def require_installed() -> None:
    """Raise `Unavailable` with the way to install the engine, unless it is there."""
    import importlib.util

    missing = [name for name in ("vllm", "vllm_omni") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not installed; on a CPU: pip install 'loudfail[cpu]', on a GPU: pip install 'loudfail[gpu]'")


# ------------------------------------------------------------------------------------------------------- what follows runs in the ranks

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Shard:
    """What one rank holds of a tensor: its slices (several for fused layers) and how ranks join: ``columns`` (output rows), ``rows`` (input columns),
    ``sum`` (partial sums), ``same`` (replicated)."""

    join: str
    slices: list[torch.Tensor]


class Pipeline(torch.nn.Module):
    """The part of a vLLM-Omni pipeline that its LoRA manager needs: the model under the name ``transformer``, slice names of fused layers, and a
    loader that takes tensors from memory through the manager's own hook."""

    def __init__(self, transformer: torch.nn.Module, packed: dict[str, list[str]], dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer = transformer
        self.stacked_params_mapping = [(f".{fused}", f".{part}", index) for fused, parts in packed.items() for index, part in enumerate(parts)]
        self.lora_dtype = dtype
        self.pending: dict[int, tuple[dict[str, LoRAParts], AdapterConfig]] = {}

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        """Build the manager's adapter from `pending` (called by ``DiffusionLoRAManager._load_adapter``)."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
        from vllm.lora.peft_helper import PEFTHelper

        parts, config = self.pending.pop(lora_request.lora_int_id)
        loras: dict[str, Any] = {}
        for module, part in parts.items():
            a, b = [t.to(dtype) for t in part.a], [t.to(dtype) for t in part.b]
            if len(a) == 1:
                loras[module] = LoRALayerWeights(module_name=module, rank=config.rank, lora_alpha=config.alpha, lora_a=a[0], lora_b=b[0])
            else:
                loras[module] = PackedLoRALayerWeights(
                    module_name=module,
                    rank=config.rank,
                    lora_alphas=[config.alpha] * len(a),
                    lora_a=a,
                    lora_b=b,
                    scaling=[config.scale] * len(a),
                )
        helper = PEFTHelper.from_dict({"r": config.rank, "lora_alpha": config.alpha, "target_modules": sorted({m.rsplit(".", 1)[-1] for m in parts})})
        return LoRAModel(lora_request.lora_int_id, config.rank, loras), helper


def start(rank: Rank) -> None:
    """Process groups of vLLM and vLLM-Omni's tensor parallelism."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)  # upstream's own calls into torch.distributed
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    use_exact_float32()
    # A name that differs from rank to rank makes vLLM's CPU communicator fall back to gloo; its shared-memory all-reduce has no integers, which
    # vLLM-Omni's projection cache sends.
    os.environ["VLLM_DIST_IDENT"] = f"loudfail-{rank.rank}"
    first = int(os.environ.get("LOCAL_RANK", "0"))  # under torchrun an engine's ranks sit on its owner's GPU and the next ones
    place = (first + rank.rank) % torch.cuda.device_count() if rank.device == "cuda" else rank.rank
    if rank.device == "cuda":
        torch.cuda.set_device(place)
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config = VllmConfig(device_config=DeviceConfig(device=rank.device))
    context = set_current_vllm_config(config)
    context.__enter__()
    rank.state["vllm"] = context  # kept for the life of the rank
    if rank.device == "cuda" and rank.backend == "gloo":
        parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        world_size=rank.size, rank=rank.rank, distributed_init_method=rank.rendezvous, local_rank=place, backend=rank.backend
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=rank.size)
    if rank.device == "cpu":
        _sum_as_a_gpu_does(rank)
    rank.at_exit += [parallel_state.destroy_distributed_environment, parallel_state.destroy_model_parallel]


#: Bytes that a pipe takes before its reader reads.
_CHUNK = 2**15


def sum_through_pipes(rank: Rank, tensor: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The sum over ranks, of any dtype and size, in the order of ``members``; the argument stays as it was.

    For a small tensor of four ranks on two cores it takes 0.08 ms of processor time a rank, gloo's all-reduce 1.7 and vLLM's in shared memory, whose
    ranks wait busily, 2.

    Raises:
        RuntimeError: another rank is at another sum, or adds another number of bytes.
    """
    done = rank.state["sums"] = rank.state.get("sums", 0) + 1
    mine = tensor.detach().contiguous()
    raw = mine.view(-1).view(torch.uint8).numpy().tobytes()
    read = {other: bytearray() for other in members if other != rank.rank}
    for start in range(0, max(1, len(raw)), _CHUNK):
        for other in read:
            rank.peers[other].send_bytes(done.to_bytes(8, "little") + raw[start : start + _CHUNK])
        for other, data in read.items():
            message = rank.peers[other].recv_bytes()
            data += message[8:]
            if (at := int.from_bytes(message[:8], "little")) != done:
                raise RuntimeError(f"rank {other} is at sum {at}, rank {rank.rank} at sum {done}")
    for other, data in read.items():
        if len(data) != len(raw):
            raise RuntimeError(f"rank {other} adds {len(data)} bytes in sum {done}, rank {rank.rank} {len(raw)}")
    if not raw:
        return mine.clone()
    parts = [torch.frombuffer(read[one], dtype=mine.dtype).view_as(mine) if one in read else mine for one in members]
    return torch.stack(parts).sum(0, dtype=mine.dtype)


def _sum_as_a_gpu_does(rank: Rank) -> None:
    """Let vLLM's all-reduce on a CPU return the sum and leave its argument as it was, as its GPU communicators do; it sums in place otherwise. A
    model that drops the returned sum is right on a CPU alone (vLLM-Omni 0.30's LTX-2)."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_reduce = lambda self, input_: sum_through_pipes(rank, input_, self.ranks)


@contextmanager
def diffusion_config(dtype: torch.dtype, architecture: Mapping[str, Any]) -> Iterator[Any]:
    """vLLM-Omni's configuration of a model that is built inside; the attention backend is that of the rank's environment."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig

    with tempfile.TemporaryDirectory() as folder:  # the configuration wants a local folder; nothing is read from it
        config = OmniDiffusionConfig(model=folder, dtype=dtype, tf_model_config=TransformerConfig.from_dict(dict(architecture)))
    with set_current_diffusion_config(config):
        yield config


def build(rank: Rank, spec: FusedModel, dtype: str, chosen: bool) -> set[str] | str:
    """Build the model without weights; the names of the attention backends in it, or why this machine cannot run it.

    Args:
        chosen: the backend was asked for, so its kernel may be missing. Whatever else goes wrong is raised, and the plain one is never excused.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.platforms import current_platform
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    if rank.device == "cpu" and current_platform.is_cuda_alike():
        return "this vLLM is built for the GPU that it sees, and does not run on the CPU beside it; --device cuda, or a CPU build of vLLM"
    torch_dtype = getattr(torch, dtype)
    model = spec.build(torch_dtype).to(rank.device).eval()
    pipeline = Pipeline(model, spec.packed_modules(), torch_dtype)
    rank.state.update(
        spec=spec,
        pipeline=pipeline,
        linears={name: module for name, module in model.named_modules() if isinstance(module, LinearBase)},
        manager=DiffusionLoRAManager(pipeline, torch.device(rank.device), torch_dtype, max_cached_adapters=2),
    )
    layers: list[Any] = [module for module in model.modules() if getattr(module, "attn_backend", None) is not None]
    for layer in layers[:1] if chosen else ():
        try:
            _try_attention(layer, torch_dtype, rank.device)
        except (ImportError, AttributeError, NotImplementedError) as error:
            return f"attention backend {layer.attn_backend.get_name()} does not run on this machine: {type(error).__name__}: {error}"
    return {layer.attn_backend.get_name() for layer in layers}


@torch.inference_mode()
def _try_attention(layer: Any, dtype: torch.dtype, device: str) -> None:
    """Attend from a few rows to themselves: a backend can be chosen whose kernel is not installed."""
    heads, width = layer.num_heads, layer.head_size
    q = torch.ones(1, 4, heads, width, dtype=dtype, device=device)
    layer(q, q, q)


@torch.no_grad()
def load_base(rank: Rank, state: dict[str, torch.Tensor] | str) -> None:
    """Load the actor's base weights, given as tensors or as the name of a safetensors file, and do what vLLM's loader does after loading."""
    rank.state["spec"].load(rank.state["pipeline"].transformer, _MappedFile(state) if isinstance(state, str) else state)
    # Asked for before: repacking may leave an empty weight of another dtype behind.
    rank.state["dtypes"] = {name: next(module.parameters()).dtype for name, module in rank.state["linears"].items()}
    for module in rank.state["linears"].values():
        module.quant_method.process_weights_after_loading(module)


class _MappedFile(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, file: str) -> None:
        from safetensors import safe_open

        self._file = safe_open(file, framework="pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _request(version: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"policy-{version}", lora_int_id=version, lora_path=os.sep)  # an existing path; nothing is read from it


def set_adapter(rank: Rank, state: dict[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
    manager, pipeline = rank.state["manager"], rank.state["pipeline"]
    parts = rank.state["spec"].hand_over(state, config, rank.size)
    old = manager.list_adapters()
    if version in old:  # the manager would keep the old weights and say nothing
        raise ValueError(f"adapter version {version} is already registered; hand new weights over under a new version")
    pipeline.pending[version] = (parts, config)
    manager.set_active_adapter(_request(version))
    for adapter in old:
        manager.remove_adapter(adapter)
    pipeline.pending.clear()
    return BindReport(version=version, registered=len(parts), bound=_bound(manager, parts, rank.state["spec"].packed_modules()))


def _bound(manager: Any, parts: Mapping[str, LoRAParts], packed: Mapping[str, list[str]]) -> int:
    """How many of the parts that were handed over are active in a layer. One part may fill several slices of a fused layer."""
    count = 0
    for name, layer in manager._lora_modules.items():
        block, _, leaf = name.rpartition(".")
        handed = sum(candidate in parts for candidate in (name, *(f"{block}.{part}" for part in packed.get(leaf, ()))))
        slices = layer._diffusion_lora_active_slices
        count += handed if all(slices) else min(handed, sum(slices))
    return count


def remove_adapter(rank: Rank) -> None:
    manager = rank.state["manager"]
    manager.set_active_adapter(None)
    for adapter in manager.list_adapters():
        manager.remove_adapter(adapter)


def suspend_adapter(rank: Rank) -> None:
    rank.state["manager"].set_active_adapter(None)


def resume_adapter(rank: Rank, version: int) -> None:
    rank.state["manager"].set_active_adapter(_request(version))


def adapter_version(rank: Rank) -> int | None:
    return rank.state["manager"]._active_adapter_id


@torch.inference_mode()
def velocity(rank: Rank, latents: dict[str, torch.Tensor], sigmas: dict[str, torch.Tensor], conditions: list[Conditions]) -> dict[str, torch.Tensor]:
    latents = {modality: value.to(rank.device) for modality, value in latents.items()}
    result = rank.state["spec"].velocity(rank.state["pipeline"].transformer, latents, sigmas, conditions)
    return {modality: value.float().cpu() for modality, value in result.items()}


@torch.inference_mode()
def rollout(rank: Rank, noise: dict[str, torch.Tensor], calls: int, conditions: list[Conditions]) -> Trajectory:
    noise = {modality: value.to(rank.device) for modality, value in noise.items()}
    return rank.state["spec"].rollout(rank.state["pipeline"].transformer, noise, calls, conditions)


def grid(rank: Rank, calls: int, case: Case | None) -> dict[str, torch.Tensor]:
    return rank.state["spec"].grid(calls, case)


def classes(rank: Rank) -> list[str]:
    pipeline, manager = rank.state["pipeline"], rank.state["manager"]
    kinds = {type(pipeline.transformer), type(manager)} | {type(module) for module in rank.state["linears"].values()}
    kinds |= {type(layer) for layer in manager._lora_modules.values()}
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def _slices(module: Any) -> tuple[str, list[int]]:
    """How a linear is sharded, and its local output sizes (one a fused slice)."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    if isinstance(module, QKVParallelLinear):
        q, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        return "columns", [q, kv, kv]
    if isinstance(module, ColumnParallelLinear):
        return "columns", list(module.output_partition_sizes)
    if isinstance(module, RowParallelLinear):
        return "rows", [module.output_size]
    return "same", [module.output_size]


@torch.inference_mode()
def base_response(rank: Rank, count: int, seed: int) -> dict[str, Shard]:
    """Every linear's own product with seeded inputs, its bias, and every other parameter under the engine's names: a matrix by its product with such
    inputs, all else as it is."""
    result: dict[str, Shard] = {}
    model, linears = rank.state["pipeline"].transformer, rank.state["linears"]
    for name, module in linears.items():
        join, sizes = _slices(module)
        x = _local_probe(rank, module, join, count, seed, rank.state["dtypes"][name])
        product = module.quant_method.apply(module, x).float().cpu()
        result[f"{name}.weight"] = Shard("sum" if join == "rows" else join, [piece.T.contiguous() for piece in product.split(sizes, dim=1)])
    for name, parameter in model.named_parameters():
        clean = name.replace(".base_layer.", ".")
        module_name, _, leaf = clean.rpartition(".")
        value = parameter.detach().float().cpu()
        if module_name not in linears:
            value = value @ probe(value.shape[1], count, seed).T if value.ndim == 2 else value
            result[clean] = Shard("columns" if rank.state["spec"].sharded(clean) else "same", [value])
        elif leaf == "bias":
            join, sizes = _slices(linears[module_name])
            result[clean] = Shard("same" if join == "rows" else join, [value] if join == "rows" else list(value.split(sizes)))
    return result


def _local_probe(rank: Rank, module: Any, join: str, count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    x = probe(module.input_size, count, seed)
    if join == "rows":
        x = x.chunk(rank.size, dim=1)[rank.rank].contiguous()
    return x.to(rank.device, dtype)


def read_buffers(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu() for name, value in rank.state["spec"].buffers(rank.state["pipeline"].transformer).items()}


@torch.inference_mode()
def delta_response(rank: Rank, count: int, seed: int) -> dict[str, Shard]:
    """What each wrapped layer's own ``apply`` adds for the adapter, on seeded inputs, with its base output replaced by zeros."""
    result: dict[str, Shard] = {}
    for full_name, layer in rank.state["manager"]._lora_modules.items():
        name = full_name.split(".", 1)[1]
        base = layer.base_layer
        join, sizes = _slices(base)
        x = _local_probe(rank, base, join, count, seed, layer.lora_a_stacked[0].dtype)
        with _zero_base(base, sum(sizes)):
            delta = layer.apply(x).float().cpu()
        result[f"{name}.delta"] = Shard("sum" if join == "rows" else join, [piece.T.contiguous() for piece in delta.split(sizes, dim=1)])
    return result


class _zero_base:
    """Replace a linear's own product by zeros for one call, so that what remains is exactly the adapter's part."""

    def __init__(self, base: Any, width: int) -> None:
        self.base, self.width, self.original = base, width, base.quant_method

    def __enter__(self) -> None:
        width = self.width

        class Zeros:
            @staticmethod
            def apply(layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
                return x.new_zeros(*x.shape[:-1], width)

        self.base.quant_method = Zeros()

    def __exit__(self, *_: object) -> None:
        self.base.quant_method = self.original


def enter_patch(rank: Rank, enter: Callable[[Any], AbstractContextManager[Any]], argument: Any) -> None:
    context = enter(argument) if argument is not None else enter()  # type: ignore[call-arg]
    fired = context.__enter__()
    rank.state.setdefault("patches", []).append((context, fired))


def leave_patches(rank: Rank) -> int:
    count = 0
    for context, fired in reversed(rank.state.pop("patches", [])):
        context.__exit__(None, None, None)
        count += int(getattr(fired, "count", 0))
    return count
