"""What ports have in common whose actor is a Diffusers transformer with PEFT adapters and whose rollout is a fused model in vLLM-Omni's engine.

A subclass says which model it is; nothing here knows one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch

from loudfail.harness.case import Case
from loudfail.harness.engines.vllm_omni import PLAIN, PRELOAD, FusedModel, VllmOmniRollout, collectives
from loudfail.harness.port import AdapterConfig, Conditions, Port, Reward, RowTable, Step, Trajectory, Update, find_reward, find_trainer
from loudfail.harness.violation import Unavailable
from loudfail.harness.world import Rank, World, preload

Latents = Mapping[str, torch.Tensor]
Sigmas = Mapping[str, torch.Tensor]


@dataclass
class VendorStep:
    """Rows of one sample before and after one step of the vendor's loop, generated rows only, and the vendor's own sigmas."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    sigma: dict[str, torch.Tensor]
    sigma_after: dict[str, torch.Tensor]


class FusedPort(Port):
    """A Diffusers actor with PEFT, a rollout in vLLM-Omni.

    Class attributes:
        scales: scale → architecture, as keyword arguments of the transformer; ``tiny`` and ``wide``.
        checkpoint: weights of scale ``tiny`` that were trained on the synthetic world; random ones where there is no such file.

    Args:
        scale: ``tiny`` (the tiny trained checkpoint) or ``wide`` (released widths, few blocks, random weights); ``wide-8`` has 8 blocks.
        weights: folder of a Diffusers checkpoint (``transformer/``, ``text_encoder/``, …) to use instead.
        device: ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``bfloat16`` (upstream's float32 modules stay float32).

    Raises:
        ValueError: no such scale.
    """

    scales: Mapping[str, Mapping[str, Any]] = {}
    checkpoint: Path
    scorers = "loudfail.trainer.rewards.build:tiny_reward"
    trainer = "loudfail.trainer.update:make"

    def __init__(self, *, scale: str = "tiny", weights: str | None = None, device: str = "cpu", dtype: str = "float32") -> None:
        name, _, blocks = scale.partition("-")
        if name not in self.scales or (blocks and not (name == "wide" and blocks.isdecimal() and int(blocks))) or scale.endswith("-"):
            raise ValueError(f"scale {scale!r} is none of {', '.join(self.scales)}, nor wide-N with a number of blocks")
        self.blocks = int(blocks or 0)
        super().__init__(scale=name, weights=weights, device=device, dtype=dtype)
        preload(*PRELOAD)  # let the rollout import while the actor does
        self._engines: dict[int, VllmOmniRollout] = {}
        #: Adapter → PEFT's name of a factor → a layer's dictionary of adapters and the way to the parameter from there.
        self._places: dict[str, dict[str, tuple[torch.nn.Module, attrgetter[Any]]]] = {}
        self._encoding: WeakSet[World] = WeakSet()  # worlds that hold a text encoder

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"scale": f"{self.scale}-{self.blocks}"} if self.blocks else {})

    @property
    def smallest(self) -> dict[str, int]:
        """The smallest extent."""
        return {axis: min(sizes) for axis, sizes in self.extents.items()}

    def transformer(self) -> Any:
        """The class of the actor."""
        raise NotImplementedError

    def fused(self, config: dict[str, Any]) -> FusedModel:
        """What is specific to the fused model, for the actor's configuration."""
        raise NotImplementedError

    def shards(self) -> Mapping[str, int]:
        """What tensor parallelism splits → its size, to see before any rank is started whether a degree divides it."""
        return {}

    # -- the actor ---------------------------------------------------------------------------------------------------------------------------
    @cached_property
    def actor(self) -> Any:
        """The transformer with the adapter ``default``, which trains."""
        actor = self._actor
        self.add_adapter("default", self.adapter)
        self.select_trainable("default")
        return actor

    @cached_property
    def _actor(self) -> Any:
        """The actor before it has an adapter."""
        kind = self.transformer()
        if self.weights is not None:
            folder = Path(self.weights) / "transformer"
            if not folder.is_dir():
                raise Unavailable(f"no folder {folder}; --weights wants a Diffusers checkpoint with transformer/, text_encoder/, vae/ …")
            model = kind.from_pretrained(folder, torch_dtype=getattr(torch, self.dtype), local_files_only=True)
        else:
            with mock.patch.object(torch.nn.Linear, "reset_parameters", return_value=None):  # every weight is written below
                model = kind(**{**self.scales[self.scale], **({"num_layers": self.blocks} if self.blocks else {})})
            if self.scale == "tiny" and self.checkpoint.is_file():
                from safetensors.torch import load_file

                model.load_state_dict(load_file(self.checkpoint))
            else:
                _randomize(model)
            if self.dtype != "float32":
                _cast(model, getattr(torch, self.dtype))
        return model.requires_grad_(False).to(self.device).eval()

    # -- objective ---------------------------------------------------------------------------------------------------------------------------
    def inputs(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions], members: Sequence[int]) -> dict[str, Any]:
        """Arguments of the transformer for the samples of one group."""
        raise NotImplementedError

    def first_row(self, condition: Conditions) -> int:
        """The row of the transformer's video output at which generated rows begin."""
        raise NotImplementedError

    # -- packing -----------------------------------------------------------------------------------------------------------------------------
    def unpack(self, rows: Latents, case: Case) -> dict[str, torch.Tensor]:
        return self.unpack_rows(rows, self.shapes(case))

    def unpack_rows(self, rows: Latents, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Rows ``(B, rows, width)`` to latents of these shapes of one sample."""
        raise NotImplementedError

    def groups(self, sigmas: Sigmas, conditions: Sequence[Conditions]) -> list[list[int]]:
        """Samples of a batch that go into one model call together, in the order of the calls that `predict_velocity` makes."""
        raise NotImplementedError

    def row_table(self, seen: Mapping[str, Any], output: Any, place: int, rows: Mapping[str, int]) -> RowTable:
        """The table of one sample.

        Args:
            seen: arguments that the transformer really got.
            output: what it returned.
            place: of the sample in that call.
            rows: modality → number of generated rows.
        """
        raise NotImplementedError

    def observe(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions]) -> tuple[dict[str, torch.Tensor], list[RowTable]]:
        calls: list[tuple[dict[str, Any], Any]] = []

        def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            for value in output:
                if value.requires_grad:
                    value.retain_grad()
            calls.append((kwargs, output))

        handle = self.actor.register_forward_hook(keep, with_kwargs=True)
        try:
            velocity = self.predict_velocity(latents, sigmas, conditions)
        finally:
            handle.remove()
        rows = {modality: packed.shape[1] for modality, packed in self.pack(latents).items()}
        tables: dict[int, RowTable] = {}
        for members, (seen, output) in zip(self.groups(sigmas, conditions), calls, strict=True):
            for place, index in enumerate(members):
                tables[index] = self.row_table(seen, output, place, rows)
        return velocity, [tables[index] for index in range(len(conditions))]

    # -- vendor ------------------------------------------------------------------------------------------------------------------------------
    def vendor_steps(self, noise: Latents, calls: int, condition: Conditions) -> list[VendorStep]:
        """The vendor's own sampling loop for one sample, noise without batch axis, call by call."""
        raise NotImplementedError

    @torch.no_grad()
    def vendor_rollout(self, noise: Latents, calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        samples = [self.vendor_steps({m: v[i] for m, v in noise.items()}, calls, condition) for i, condition in enumerate(conditions)]
        shapes = {modality: tuple(value.shape[1:]) for modality, value in noise.items()}
        steps = []
        for parts in zip(*samples, strict=True):
            before = self.unpack_rows({m: torch.stack([p.before[m] for p in parts]) for m in self.modalities}, shapes)
            after = self.unpack_rows({m: torch.stack([p.after[m] for p in parts]) for m in self.modalities}, shapes)
            now = {m: torch.stack([p.sigma[m] for p in parts]) for m in self.modalities}
            then = {m: torch.stack([p.sigma_after[m] for p in parts]) for m in self.modalities}
            velocity = {m: (before[m] - after[m]) / (now[m] - then[m]).view(-1, *[1] * (before[m].ndim - 1)) for m in self.modalities}
            steps.append(Step(before, now, velocity, after))
        return Trajectory(steps)

    # -- adapter -----------------------------------------------------------------------------------------------------------------------------
    def projections(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, module in self.actor.named_modules():
            if any(name.endswith(f".{target}") for target in self.adapter.targets) and hasattr(module, "in_features"):
                found[name] = (module.out_features, module.in_features)
        return found

    def add_adapter(self, name: str, config: AdapterConfig) -> None:
        from peft import LoraConfig

        model = self._actor
        before = {n for n, p in model.named_parameters() if p.requires_grad}
        present = list(getattr(model, "peft_config", {}))
        self._places.pop(name, None)
        if name in present:
            model.delete_adapters(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what we want
            model.add_adapter(LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets)), adapter_name=name)
        if before and present:
            model.set_adapter("default")
            for parameter_name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter_name in before)

    def adapter_names(self) -> list[str]:
        return list(getattr(self.actor, "peft_config", {}))

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        return {key: value.detach().to("cpu", torch.float32, copy=True) for key, value in self._factors(name).items()}

    @torch.no_grad()
    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        here = self._factors(name)
        wrong = sorted(set(here) ^ set(state)) or sorted(key for key in here if here[key].shape != state[key].shape)
        if wrong:
            raise ValueError(f"adapter {name!r}: {len(wrong)} names or shapes do not match, for example {wrong[:3]}")
        for key, parameter in here.items():
            parameter.copy_(state[key])

    def _factors(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The parameters of an adapter by the names that PEFT saves them under. PEFT is asked once: it walks all modules for every answer."""
        if name not in self.adapter_names():
            raise ValueError(f"no adapter {name!r}; there are {self.adapter_names()}")
        if name not in self._places:
            from peft import get_peft_model_state_dict

            where = {value.data_ptr(): place for place, value in self.actor.named_parameters()}
            saved = get_peft_model_state_dict(self.actor, adapter_name=name)
            places: dict[str, tuple[torch.nn.Module, attrgetter[Any]]] = {}
            # The dictionary of a layer's adapters stays when one of them is added anew; what is in it does not.
            for key, value in saved.items():
                layer, _, leaf = f"{where[value.data_ptr()]}.".rpartition(f".{name}.")
                places[key] = self.actor.get_submodule(layer), attrgetter(f"{name}.{leaf}".rstrip("."))
            self._places[name] = places
        return {key: within(layer) for key, (layer, within) in self._places[name].items()}

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        actor = self.actor
        active = actor.active_adapters()
        if active == [name]:
            yield
            return
        # PEFT also decides what trains when it selects; the base model's flags it leaves alone.
        flags = [(factor, factor.requires_grad) for adapter in self.adapter_names() for factor in self._factors(adapter).values()]
        try:
            if name is None:
                actor.disable_adapters()
            else:
                actor.set_adapter(name)
                for factor, trains in flags:
                    factor.requires_grad_(trains)
            yield
        finally:
            if name is None:
                actor.enable_adapters()
            actor.set_adapter(active)
            for factor, trains in flags:
                factor.requires_grad_(trains)

    def select_trainable(self, name: str) -> None:
        self._actor.set_adapter(name)
        for parameter_name, parameter in self._actor.named_parameters():
            parameter.requires_grad_(f".{name}." in parameter_name)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.actor.named_parameters() if parameter.requires_grad}

    def base_state(self) -> dict[str, torch.Tensor]:
        state = {name.replace(".base_layer.", "."): value for name, value in self.actor.state_dict().items() if ".lora_" not in name}
        return {name: getattr(value, "full_tensor", lambda value=value: value)().detach().cpu() for name, value in state.items()}

    # -- engine ------------------------------------------------------------------------------------------------------------------------------
    def engine(self, degree: int) -> VllmOmniRollout:
        self.check_degree(degree)
        if degree in self._engines and not self._engines[degree].world.alive:
            self._engines.pop(degree).world.check()  # says so if a rank died unseen; what a failed call closed is built again
        if degree not in self._engines:
            config = {key: value for key, value in dict(self.actor.config).items() if not key.startswith("_")}
            threads = 1
            if self.scale != "tiny" or self.weights is not None:  # one engine at a time is all that memory has room for
                self.close()
                threads = max(1, (os.cpu_count() or 1) // degree)
            engine = VllmOmniRollout(
                self.fused(config), degree, dtype=self.dtype, device=self.device, threads=threads, attention=self.attention or PLAIN
            )
            engine.load_base(self.base_state())
            self._engines[degree] = engine
        return self._engines[degree]

    def collectives(self, degree: int) -> str:
        return collectives(degree, self.device)

    def check_degree(self, degree: int) -> None:
        if self.weights is not None:
            return  # the engine itself checks; its configuration is in the checkpoint
        for what, size in self.shards().items():
            if size % degree:
                raise ValueError(f"tensor-parallel degree {degree} does not divide the {size} of the {what}")

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    # -- prompt ------------------------------------------------------------------------------------------------------------------------------
    #: What ran as the rollout's text encoder, read in a rank; called only where one was loaded.
    encoder_classes: Callable[[Rank], list[str]]

    def encoding_world(self, load: Callable[[World], None]) -> World:
        """The world of an engine that is there (degree 1 if none is), in which ``load`` has put the rollout's text encoder once.

        Raises:
            Unavailable: no engine on this machine.
        """
        world = self.engine(min((degree for degree, engine in self._engines.items() if engine.world.alive), default=1)).world
        if world not in self._encoding:
            load(world)
            self._encoding.add(world)
        return world

    # -- reward, update ----------------------------------------------------------------------------------------------------------------------
    def reward(self) -> Reward:
        return self._reward

    @cached_property
    def _reward(self) -> Reward:
        return find_reward(self.scorers)

    def update(self) -> Update:
        return find_trainer(self.trainer)(self)

    # -- trained -----------------------------------------------------------------------------------------------------------------------------
    def trained_batch(self, seed: int, count: int) -> tuple[dict[str, torch.Tensor], list[Conditions]]:
        from loudfail.harness import synthetic

        if self.scale != "tiny" or self.weights is not None or not self.checkpoint.is_file():
            raise Unavailable(
                "only the built-in checkpoint of scale 'tiny' was trained on the synthetic world; use neither --weights nor another --scale"
            )
        extent = {axis: sizes[0] for axis, sizes in self.extents.items()}  # most of what it was trained on
        classes = [index % len(synthetic.PROMPTS) for index in range(count)]
        latents = synthetic.sample(self.shapes(Case(extent=extent)), classes, seed, self.time_axis["audio"])
        return latents, [self.condition(self.tokenize(synthetic.PROMPTS[index])) for index in classes]

    def condition(self, prompt_ids: Sequence[int], given: Mapping[str, torch.Tensor] | None = None, seed: int = 0) -> Conditions:
        """Conditions of one sample from token ids and, by name, clean given latents; ``seed`` is that of its request."""
        raise NotImplementedError

    # -- shared ------------------------------------------------------------------------------------------------------------------------------
    def parts(self) -> list[Any]:
        """The upstream objects that run here."""
        return [self.actor]

    def classes(self) -> list[str]:
        names = {f"{type(part).__module__}.{type(part).__qualname__}" for part in self.parts()}
        if "_reward" in vars(self):
            names |= {f"{name} (reward: {weights})" for name, weights in self._reward.origins().items()}
        for engine in self._engines.values():
            names |= set(engine.classes())
            if engine.world in self._encoding and engine.world.alive:
                names |= set(engine.world.call(type(self).encoder_classes)[0])
        return sorted(names)


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Seeded weights of standard deviation ``0.7 / sqrt(in)``, biases and norms that are not trivial."""
    generator = torch.Generator().manual_seed(20260101)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.uniform_(-1, 1, generator=generator).mul_(0.7 * (3 / parameter.shape[1]) ** 0.5)
        else:
            parameter.uniform_(-0.1, 0.1, generator=generator).add_(0 if name.endswith("bias") else 1)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """To ``dtype``, with the modules that upstream keeps in float32 left there (``model.to`` would cast them too)."""
    for name, parameter in model.named_parameters():
        if not any(kept in name for kept in model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.to(dtype)
