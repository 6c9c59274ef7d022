"""The trainer of `existing_stack` as a port. Nothing of it was moved or changed; each method says in one line how its terms are ours."""

from contextlib import contextmanager

import torch
from existing_stack import LORA, ExistingTrainer, Worker, picture_reward, sound_reward, to_media
from peft import LoraConfig

from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Port, Step, Trajectory, probe


class Existing(Port):
    name = "existing"
    modalities = ("video", "audio")
    extents = {"frames": (2, 3), "size": (2, 3), "audio": (3, 5)}
    adapter = AdapterConfig(rank=LORA["r"], alpha=LORA["lora_alpha"], targets=tuple(LORA["target_modules"]))
    rates = {"video": 8.0, "audio": 1200.0}
    time_axis = {"video": 1, "audio": 0}

    def __init__(self, **options):
        super().__init__(**options)
        self.stack, self.engines = ExistingTrainer(), {}
        self.rewards = Rewards()
        self.select_trainable("default")

    # -- objective: their batch has t = 1 − sigma, their output is x0 − noise
    def shapes(self, case):
        frames, size, audio = (case.extent[axis] for axis in ("frames", "size", "audio"))
        return {"video": (4, frames, size, size), "audio": (audio, 6)}

    def conditions(self, case):
        return [Conditions(tuple(p.encode()), self.stack.embed([p])) for p in case.prompts]

    def grid(self, calls, case=None):
        return {m: 1 - self.stack.timesteps(calls, m) for m in self.modalities}

    def batch(self, latents, sigmas, conditions):
        text = torch.cat([c.embeds for c in conditions])
        return dict(latents) | {f"t_{m}": 1 - s for m, s in sigmas.items()} | {"text": text}

    def predict_velocity(self, latents, sigmas, conditions):
        return {m: -v for m, v in self.stack.forward(self.batch(latents, sigmas, conditions)).items()}

    # -- vendor: their own sampling loop, watched
    def vendor_rollout(self, noise, calls, conditions):
        steps, count = [], len(conditions)

        def seen(x, now, after, then):
            sigmas = {m: (1 - t).repeat(count) for m, t in now.items()}
            steps.append(Step(x, sigmas, {m: (x[m] - after[m]) / (then[m] - now[m]) for m in x}, after))

        self.stack.sample(noise, [bytes(c.prompt_ids).decode() for c in conditions], calls, seen)
        return Trajectory(steps)

    def vendor_grid(self, calls, case=None):
        level = torch.linspace(1, 0, calls + 1, dtype=torch.float64)  # the shift as it was published with the weights
        return {m: (s * level / (1 + (s - 1) * level)).float() for m, s in (("video", 5), ("audio", 2))}

    # -- adapter: their adapter is called "policy"; names are PEFT's
    def named(self, name):
        return {"default": "policy"}.get(name, name)

    def layers(self):
        return {n: m for n, m in self.stack.model.named_modules() if hasattr(m, "lora_A")}

    def projections(self):
        return {n: (m.out_features, m.in_features) for n, m in self.layers().items()}

    def add_adapter(self, name, config):
        trains, active = self.trainable(), self.active
        for layer in self.layers().values():
            layer.update_layer(self.named(name), config.rank, config.alpha, config=LoraConfig(r=config.rank, lora_alpha=config.alpha))
            layer.set_adapter(self.named(active))
        for parameter_name, parameter in self.stack.model.named_parameters():
            parameter.requires_grad_(parameter_name in trains)

    def adapter_names(self):
        names = list(next(iter(self.layers().values())).lora_A)
        return ["default" if n == "policy" else n for n in names]

    def tensors(self, name):
        name = self.named(name)
        return {f"{n}.lora_{f}.weight": getattr(m, f"lora_{f}")[name].weight for n, m in self.layers().items() for f in "AB"}

    def adapter_state(self, name):
        return {n: v.detach().clone() for n, v in self.tensors(name).items()}

    def load_adapter(self, name, state):
        here = self.tensors(name)
        if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in here.items()}:
            raise ValueError("names or shapes do not match")
        for n, value in state.items():
            here[n].data.copy_(value)

    @contextmanager
    def using(self, name):
        flags = {p: p.requires_grad for p in self.stack.model.parameters()}
        for layer in self.layers().values():
            layer.enable_adapters(False) if name is None else layer.set_adapter(self.named(name))
        try:
            yield
        finally:
            for layer in self.layers().values():
                layer.enable_adapters(True)
                layer.set_adapter(self.named(self.active))
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def select_trainable(self, name):
        self.active = name
        for layer in self.layers().values():
            layer.set_adapter(self.named(name))
        for n, parameter in self.stack.model.named_parameters():
            parameter.requires_grad_(f".{self.named(name)}." in n)

    def trainable(self):
        return {n: p for n, p in self.stack.model.named_parameters() if p.requires_grad}

    def base_state(self):
        return {n.replace(".base_layer.", "."): v.detach().clone() for n, v in self.stack.model.state_dict().items() if "lora_" not in n}

    # -- engine: their worker, one process
    def engine(self, degree):
        if degree != 1:
            raise ValueError("the worker has one rank")
        return self.engines.setdefault(1, self.engines.get(1) or Engine(self))

    # -- media, reward: their decoder and functions
    def decode(self, latents):
        pixels, waves = to_media(latents["video"], latents["audio"])
        return [Media(Video(p.numpy(), 8.0), Audio(w.numpy(), 1200)) for p, w in zip(pixels, waves, strict=True)]

    def reward(self):
        return self.rewards


class Engine:
    degree = 1

    def __init__(self, port):
        self.port, self.worker, self.version = port, Worker(), None
        self.load_base(port.base_state())

    def load_base(self, state):
        self.worker.load({n: v.clone() for n, v in state.items()})

    def base_response(self, count, seed):
        state = self.worker.model.state_dict()
        return {n: v @ probe(v.shape[1], count, seed).T if v.ndim == 2 else v.clone() for n, v in state.items()}

    def set_adapter(self, state, config, version):
        if version == self.version:
            raise RuntimeError(f"version {version} is in use")
        self.worker.load_lora(self.port.stack.lora_for_worker(state), config.scale)
        self.version = version
        return BindReport(version, len(state) // 2, len(self.worker.lora) // 2)

    def remove_adapter(self):
        self.worker.load_lora({}, 1.0)
        self.version = None

    def adapter_version(self):
        return self.version

    def delta_response(self, count, seed):
        names = {n.rpartition("/")[0] for n in self.worker.lora}
        inputs = {n: probe(self.worker.lora[f"{n}/A"].shape[1], count, seed) for n in names}
        return {f"layers.{n.replace('/', '.')}": self.worker.added(n, x).T for n, x in inputs.items()}

    def velocity(self, latents, sigmas, conditions):
        return {m: -v for m, v in self.worker.denoise(self.port.batch(latents, sigmas, conditions)).items()}

    def replicated(self, *call):
        return [self.velocity(*call)]

    def grid(self, calls, case=None):
        return {m: 1 - self.port.stack.timesteps(calls, m) for m in self.port.modalities}

    def rollout(self, noise, calls, conditions):
        steps, x, grid = [], dict(noise), self.grid(calls)
        for i in range(calls):
            now = {m: g[i].repeat(len(conditions)) for m, g in grid.items()}
            v = self.velocity(x, now, conditions)
            after = {m: x[m] + (grid[m][i + 1] - grid[m][i]) * v[m] for m in x}
            steps.append(Step(x, now, v, after))
            x = after
        return Trajectory(steps)

    def classes(self):
        return ["existing_stack.Worker"]


class Rewards:
    outputs = {"picture": frozenset({"video", "prompt"}), "sound": frozenset({"audio"}), "total": frozenset({"video", "audio", "prompt"})}
    weights = {"picture": 1.0, "sound": 1.0}
    missing = {}

    def score(self, media, prompts):
        if not media or len(media) != len(prompts) or not all(prompts):
            raise ValueError(f"{len(media)} samples and {len(prompts)} prompts")
        picture = [picture_reward(torch.tensor(m.video.frames)[None], [p])[0] for m, p in zip(media, prompts, strict=True)]
        sound = [sound_reward(torch.tensor(m.audio.waveform)[None], m.audio.sample_rate)[0] for m in media]
        scores = {"picture": torch.tensor(picture).double(), "sound": torch.tensor(sound).double()}
        return scores | {"total": scores["picture"] + scores["sound"]}

    @contextmanager
    def watch(self):
        yield []

    def models(self):
        return {}

    def origins(self):
        return {"existing_stack.picture_reward": "real", "existing_stack.sound_reward": "real"}
