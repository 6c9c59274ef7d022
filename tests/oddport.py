"""A deliberately odd model: three modalities in one interleaved sequence, a timestep that runs from noise to data, an output that points to the data.

Nothing in the suite may know that modalities are called video and audio, that there are two of them, or that their rows stand block after block.
First what a vendor would ship (`OddModel`, `OddScheduler`, `sample`), then a second implementation as the rollout, then the port.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from toyactor import ToyActor

from loudfail.harness.case import Case
from loudfail.harness.media import Audio, Video
from loudfail.harness.port import AdapterConfig, BindReport, Port, RowTable, Step, Trajectory, Update, find_trainer, probe

KINDS, WIDTHS, HIDDEN, TEXT = ("video", "depth", "audio"), {"video": 3, "depth": 1, "audio": 2}, 24, 6
SHIFTS = {"video": 4.0, "audio": 1.5, "depth": 2.0}


# -- the vendor's model: L rows in the order of their frame, whatever their kind -----------------------------------------------------------------
class OddModel(torch.nn.Module):
    """Rows ``(L, 3)``, kinds ``(L,)``, places ``(L, 2)``, timesteps ``(L,)`` from 0 (noise) to 1000 (data), text ``(n, TEXT)`` → ``x0 − noise``."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.enter, self.leave = (torch.nn.Parameter(torch.randn(3, *size, generator=draw)) for size in ((HIDDEN, 3), (3, HIDDEN)))
        self.told, self.text = (torch.nn.Parameter(torch.randn(HIDDEN, n, generator=draw)) for n in (4, TEXT))
        sizes = {"up": (HIDDEN, 32), "down": (32, HIDDEN)}
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleDict({n: torch.nn.Linear(*s, bias=False) for n, s in sizes.items()}) for _ in range(2))
        for linear in (linear for block in self.blocks for linear in block.values()):
            linear.weight.data = torch.randn(linear.weight.shape, generator=draw) / linear.weight.shape[1] ** 0.5
        for number, kind in enumerate(KINDS):  # narrow rows stay narrow
            self.leave.data[number, WIDTHS[kind] :] = 0

    def forward(self, rows: Any, kinds: Any, places: Any, timesteps: Any, text: Any, linear: Any = None) -> torch.Tensor:
        linear = linear or (lambda name, x: self.get_submodule(name)(x))
        t = timesteps / 1000
        h = torch.einsum("lhc,lc->lh", self.enter[kinds], rows) + torch.stack([t, torch.sin(5 * t), *torch.sin(places).T], 1) @ self.told.T
        h = h + (text @ self.text.T).mean(0)
        for block in ("blocks.0", "blocks.1"):
            mixed = h + h.mean(0)
            h = h + linear(f"{block}.down", torch.tanh(linear(f"{block}.up", mixed / 3)))
        return torch.einsum("lch,lh->lc", self.leave[kinds], h) / HIDDEN


class OddScheduler:
    """Timesteps from 0 to 1000, shifted; a step walks along the output."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def timesteps(self, calls: int) -> torch.Tensor:
        level = torch.arange(calls, -1, -1, dtype=torch.float64) / calls
        return 1000 * (1 - self.shift * level / (1 + (self.shift - 1) * level))


def arrange(case_frames: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kinds ``(L,)`` and places ``(L, 2)`` (time, index in the frame), interleaved: each frame's pixels, depths and two sound steps."""
    kinds, places = [], []
    for frame in range(case_frames):
        for pixel in range(height * width):
            kinds += [0, 1]
            places += [(frame, pixel)] * 2
        kinds += [2, 2]
        places += [(frame, 0), (frame + 0.5, 0)]
    return torch.tensor(kinds), torch.tensor(places, dtype=torch.float32)


def sample(model: OddModel, rows: torch.Tensor, kinds: torch.Tensor, places: torch.Tensor, text: torch.Tensor, calls: int) -> Iterator[tuple]:
    """The vendor's loop on one sample: rows and timesteps before, rows and timesteps after."""
    tables = torch.stack([OddScheduler(SHIFTS[kind]).timesteps(calls) for kind in KINDS])
    for now, then in zip(tables.T[:-1], tables.T[1:], strict=True):
        output = model(rows, kinds, places, now.float()[kinds], text)
        after = (rows.double() + ((then - now) / 1000)[kinds, None] * output.double()).float()
        yield rows, now, after, then
        rows = after


# -- the rollout: the same weights, by other code --------------------------------------------------------------------------------------------------
class OddRollout:
    """Every linear is cut over ``degree`` shards of its rows; LoRA is added shard by shard. Loads, binds, and reports as an engine does."""

    def __init__(self, port: OddPort, degree: int) -> None:
        self.degree, self.port, self.model = degree, port, OddModel()
        self.lora: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.version: int | None = None
        self.load_base(port.base_state())

    def load_base(self, state: Mapping[str, torch.Tensor]) -> None:
        self.model.load_state_dict({n: v.clone() for n, v in state.items()})

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
        if version == self.version:
            raise RuntimeError(f"version {version} is active already")
        names = {n.rsplit(".lora_", 1)[0] for n in state}
        self.lora = {n: (state[f"{n}.lora_A.weight"].clone(), config.alpha / config.rank * state[f"{n}.lora_B.weight"]) for n in names}
        self.version = version
        return BindReport(version, len(names), len(self.lora))

    def remove_adapter(self) -> None:
        self.lora, self.version = {}, None

    def adapter_version(self) -> int | None:
        return self.version

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        parts = self.model.get_submodule(name).weight.chunk(self.degree)
        y = torch.cat([x @ part.T for part in parts], -1)
        return y + self.delta(name, x) if name in self.lora else y

    def delta(self, name: str, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora[name]
        return torch.cat([(x @ a.T) @ part.T for part in b.chunk(self.degree)], -1)

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        return {n: self.delta(n, probe(a.shape[1], count, seed)).T for n, (a, _) in self.lora.items()}

    def base_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        state = self.model.state_dict()
        return {n: (v @ probe(v.shape[1], count, seed).T if v.ndim == 2 else v.clone()) for n, v in state.items()}

    @torch.no_grad()
    def velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return self.port.forward(self.model, latents, sigmas, conditions, self.linear)

    def replicated(self, latents: Any, sigmas: Any, conditions: Any) -> list[dict[str, torch.Tensor]]:
        return [self.velocity(latents, sigmas, conditions)] * self.degree

    def rollout(self, noise: Any, calls: int, conditions: Any) -> Trajectory:
        steps, x, grid = [], dict(noise), self.grid(calls)
        for i in range(calls):
            now = {m: g[i].repeat(len(conditions)) for m, g in grid.items()}
            v = self.velocity(x, now, conditions)
            after = {m: x[m] + (grid[m][i + 1] - grid[m][i]) * v[m] for m in x}
            steps.append(Step(x, now, v, after))
            x = after
        return Trajectory(steps)

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return {m: (1 - OddScheduler(SHIFTS[m]).timesteps(calls) / 1000).float() for m in self.port.modalities}

    def classes(self) -> list[str]:
        return ["oddport.OddModel"]


# -- what is judged --------------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Scene:
    """Three parts of one sample; depth is a grey video."""

    video: Video
    audio: Audio
    depth: Video


class Judge(torch.nn.Module):
    """A fixed random function of a part (mixed down, against sines of its own time) and of the prompt's bytes, each only if it is asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(64, generator=torch.Generator().manual_seed(seed)))

    def forward(self, parts: list[Any], prompt: str | None) -> torch.Tensor:
        features = []
        for part in parts:
            if isinstance(part, Audio):
                x, rate = part.waveform.mean(0)[:, None], part.sample_rate
            else:
                x, rate = part.frames.reshape(len(part.frames), -1) / 255, part.fps
            t = np.arange(len(x)) / rate
            across = np.cos(np.arange(x.shape[1]))
            features += [((x @ across) * np.cos(w * t + w)).mean() for w in (0.0, 1.0, 2.7, 30.0)] + [(x**2).mean(), len(x) / rate]
        if prompt is not None:
            features += [float(np.sin(1.7 * np.frombuffer(prompt.encode(), np.uint8) * (1 + np.arange(len(prompt.encode())))).sum())]
        values = torch.tensor(features, dtype=torch.float64)
        return torch.tanh((values * self.weight[: len(values)]).sum())


class OddReward:
    """One scorer a modality, and one for how depth fits the video."""

    outputs = {
        "look": frozenset({"video", "prompt"}), "sound": frozenset({"audio", "prompt"}), "shape": frozenset({"depth"}),
        "fit": frozenset({"video", "depth"}), "total": frozenset({"video", "audio", "depth", "prompt"}),
    }  # fmt: skip
    weights = {"look": 1.0, "sound": 0.5, "shape": 0.25, "fit": 2.0}
    missing: dict[str, str] = {}

    def __init__(self) -> None:
        self.judges = {name: Judge(i) for i, name in enumerate(self.weights)}

    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        if not media or len(media) != len(prompts) or not all(prompts):
            raise ValueError(f"{len(media)} samples and {len(prompts)} prompts, none empty, please")
        if any(getattr(one, m, None) is None for one in media for m in SHIFTS):
            raise ValueError("a sample lacks a part")
        result = {}
        for name, judge in self.judges.items():
            parts = [m for m in SHIFTS if m in self.outputs[name]]
            told = "prompt" in self.outputs[name]
            result[name] = torch.stack([judge([getattr(o, m) for m in parts], p if told else None) for o, p in zip(media, prompts, strict=True)])
        result["total"] = torch.stack([self.weights[n] * v for n, v in result.items()]).sum(0)
        if not all(bool(v.isfinite().all()) for v in result.values()):
            raise ValueError("a score is not finite")
        return result

    @contextmanager
    def watch(self) -> Iterator[list[Any]]:
        yield []

    def models(self) -> Mapping[str, torch.nn.Module]:
        return self.judges

    def origins(self) -> Mapping[str, str]:
        return {"oddport.Judge": "synthetic"}


# -- the port --------------------------------------------------------------------------------------------------------------------------------------
class OddPort(ToyActor):
    """The odd model behind the one convention; adapters are the toy actor's."""

    name = "odd"
    modalities = ("video", "audio", "depth")
    extents = {"frames": (2, 3), "height": (2,), "width": (2, 3)}
    adapter = AdapterConfig(rank=4, alpha=8.0, targets=("up", "down"))
    shift = SHIFTS
    time_axis = {"video": 1, "audio": 1, "depth": 0}
    rates = {"video": 4.0, "audio": 800.0, "depth": 4.0}
    trainer = "loudfail.trainer.update:make"

    def __init__(self, **keywords: Any) -> None:
        Port.__init__(self, **keywords)
        self.actor = OddModel().requires_grad_(False)
        self.base = {n: module.weight for n, module in self.actor.named_modules() if isinstance(module, torch.nn.Linear)}
        self.configs: dict[str, AdapterConfig] = {}
        self.adapters, self.active, self.engines, self.judged = {}, None, dict[int, OddRollout](), OddReward()
        self.add_adapter("default", self.adapter)
        self.select_trainable("default")

    def base_state(self) -> dict[str, torch.Tensor]:
        return {n: v.detach().clone() for n, v in self.actor.state_dict().items()}

    # -- adapter: the toy actor's, each with its own rank and alpha
    def add_adapter(self, name: str, config: AdapterConfig) -> None:
        super().add_adapter(name, config)
        self.configs[name] = config
        for key, value in self.adapters[name].items():
            if "lora_A" in key:
                torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(len(key)))
            value.requires_grad_(name == self.active)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.base[name].T
        if self.active is None:
            return y
        lora = self.adapters[self.active]
        return y + self.configs[self.active].scale * (x @ lora[f"{name}.lora_A.weight"].T @ lora[f"{name}.lora_B.weight"].T)

    # -- objective, packing
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        frames, height, width = (case.extent[axis] for axis in ("frames", "height", "width"))
        return {"video": (3, frames, height, width), "audio": (2, 2 * frames), "depth": (frames, height, width)}

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        u = torch.linspace(1, 0, calls + 1, dtype=torch.float64)
        return {m: (s * u / (1 + (s - 1) * u)).float() for m, s in SHIFTS.items()}

    def pack(self, latents: Any) -> dict[str, torch.Tensor]:
        return {
            "video": latents["video"].permute(0, 2, 3, 4, 1).flatten(1, 3),
            "audio": latents["audio"].transpose(1, 2),
            "depth": latents["depth"].flatten(1)[..., None],
        }

    def unpack(self, rows: Any, case: Case) -> dict[str, torch.Tensor]:
        _, *size = self.shapes(case)["video"]
        return {
            "video": rows["video"].unflatten(1, size).permute(0, 4, 1, 2, 3).contiguous(),
            "audio": rows["audio"].transpose(1, 2).contiguous(),
            "depth": rows["depth"][..., 0].unflatten(1, size),
        }

    def sequence(self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor) -> torch.Tensor:
        """Rows of one sample by modality → the interleaved ``(L, 3)``, narrow ones filled up with zeros."""
        result = torch.zeros(len(kinds), 3)
        for number, kind in enumerate(KINDS):
            result = result.index_put(((kinds == number).nonzero()[:, 0],), torch.nn.functional.pad(rows[kind], (0, 3 - WIDTHS[kind])))
        return result

    def parts(self, sequence: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        return {kind: sequence[kinds == number][:, : WIDTHS[kind]] for number, kind in enumerate(KINDS)}

    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return self.forward(self.actor, latents, sigmas, conditions, self._linear)

    def forward(self, model: OddModel, latents: Any, sigmas: Any, conditions: Any, linear: Any) -> dict[str, torch.Tensor]:
        case = Case(extent=dict(zip(("frames", "height", "width"), latents["depth"].shape[1:], strict=True)))
        kinds, places = arrange(*case.extent.values())
        packed, outputs = self.pack(latents), []
        for i, condition in enumerate(conditions):
            timesteps = 1000 * (1 - torch.stack([sigmas[kind][i] for kind in KINDS]))[kinds]
            rows = self.sequence({m: v[i] for m, v in packed.items()}, kinds)
            outputs.append(self.parts(model(rows, kinds, places, timesteps, condition.embeds, linear), kinds))
        return {m: -v for m, v in self.unpack({m: torch.stack([o[m] for o in outputs]) for m in packed}, case).items()}

    def observe(self, latents: Any, sigmas: Any, conditions: Any) -> tuple[dict[str, torch.Tensor], list[RowTable]]:
        tables = []

        def read(module: Any, args: Any, output: torch.Tensor) -> None:
            rows, kinds, places, timesteps, *_ = args
            if output.requires_grad:
                output.retain_grad()
            names, none = tuple(KINDS[k] for k in kinds.tolist()), torch.zeros(len(kinds), dtype=torch.bool)
            tables.append(RowTable(names, none, 1 - timesteps.detach() / 1000, places, self.parts(rows, kinds), self.parts(output, kinds)))

        handle = self.actor.register_forward_hook(read)
        try:
            return self.predict_velocity(latents, sigmas, conditions), tables
        finally:
            handle.remove()

    # -- vendor
    @torch.no_grad()
    def vendor_rollout(self, noise: Any, calls: int, conditions: Any) -> Trajectory:
        case = Case(extent=dict(zip(("frames", "height", "width"), noise["depth"].shape[1:], strict=True)))
        kinds, places = arrange(*case.extent.values())
        packed = self.pack(noise)
        walks = []
        with self.merged():
            for i, condition in enumerate(conditions):
                rows = self.sequence({m: v[i] for m, v in packed.items()}, kinds)
                walks.append(list(sample(self.actor, rows, kinds, places, condition.embeds, calls)))
        steps = []
        for moves in zip(*walks, strict=True):
            x, after = (self.unpack({m: torch.stack([self.parts(move[at], kinds)[m] for move in moves]) for m in packed}, case) for at in (0, 2))
            now, then = ({m: (1 - moves[0][at][KINDS.index(m)] / 1000).float().repeat(len(moves)) for m in packed} for at in (1, 3))
            step = {m: (now[m] - then[m]).view(-1, *[1] * (x[m].ndim - 1)) for m in packed}
            steps.append(Step(x, now, {m: (x[m] - after[m]) / step[m] for m in packed}, after))
        return Trajectory(steps)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The vendor's model with the adapter in use merged into its weights."""
        kept = {n: w.clone() for n, w in self.base.items()}
        for n, w in self.base.items() if self.active is not None else ():
            w += self.configs[self.active].scale * self.adapters[self.active][f"{n}.lora_B.weight"] @ self.adapters[self.active][f"{n}.lora_A.weight"]
        try:
            yield
        finally:
            for n, w in self.base.items():
                w.copy_(kept[n])

    def vendor_grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return {m: (1 - OddScheduler(s).timesteps(calls) / 1000).float() for m, s in SHIFTS.items()}

    # -- engine, media, reward, update
    def engine(self, degree: int) -> Any:
        return self.engines.get(degree) or self.engines.setdefault(degree, OddRollout(self, degree))

    def decode(self, latents: Any) -> list[Scene]:
        scenes = []
        for i in range(len(latents["video"])):
            frames = latents["video"][i].permute(1, 2, 3, 0).sigmoid().mul(255).byte().numpy()
            depth = latents["depth"][i][..., None].expand(-1, -1, -1, 3).sigmoid().mul(255).byte().numpy()
            t = torch.arange(100)
            sound = (latents["audio"][i].repeat_interleave(100, 1) * torch.cos(0.3 * t).repeat(latents["audio"].shape[2])).div(6).clamp(-1, 1)
            scenes.append(Scene(Video(frames, 4.0), Audio(sound.float().numpy(), 800), Video(depth, 4.0)))
        return scenes

    def reward(self) -> Any:
        return self.judged

    def update(self) -> Update:
        return find_trainer(self.trainer)(self)

    def classes(self) -> list[str]:
        return ["oddport.OddModel", "oddport.OddScheduler"]
