"""Code in the shape of a trainer that someone has already: its own forward, LoRA mapping, rollout worker and reward functions. It knows no Loudfail.

`docs/porting.md` wraps it as a port without moving a line of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

CHANNELS, BINS, WIDTH, TEXT = 4, 6, 32, 8
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["wide", "narrow"]}


class Denoiser(nn.Module):
    """Tokens of both streams, one after the other; ``t`` is 0 for noise and 1 for data, the output points to the data."""

    def __init__(self) -> None:
        super().__init__()
        self.video_in, self.audio_in, self.condition = nn.Linear(CHANNELS, WIDTH), nn.Linear(BINS, WIDTH), nn.Linear(TEXT + 1, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"wide": nn.Linear(WIDTH, 2 * WIDTH), "narrow": nn.Linear(2 * WIDTH, WIDTH)}) for _ in range(2))
        self.video_out, self.audio_out = nn.Linear(WIDTH, CHANNELS), nn.Linear(WIDTH, BINS)

    def forward(self, video: torch.Tensor, audio: torch.Tensor, t_video: torch.Tensor, t_audio: torch.Tensor, text: torch.Tensor) -> tuple:
        def told(t: torch.Tensor) -> torch.Tensor:
            return self.condition(torch.cat([text, 2 * t[:, None]], 1))[:, None]

        x = torch.cat([self.video_in(video) + told(t_video), self.audio_in(audio) + told(t_audio)], 1)
        for layer in self.layers:
            x = x + layer["narrow"](torch.tanh(layer["wide"](x + x.mean(1, keepdim=True))))
        rows = video.shape[1]
        return self.video_out(x[:, :rows]), self.audio_out(x[:, rows:])


class ExistingTrainer:
    """What the trainer's own recipes call."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.model = inject_adapter_in_model(LoraConfig(**LORA), Denoiser(), adapter_name="policy")
        self.shift = {"video": 5.0, "audio": 2.0}

    def embed(self, prompts: list[str]) -> torch.Tensor:
        frequencies = torch.arange(1, TEXT + 1)
        return torch.stack([torch.sin(torch.tensor([*p.encode()])[:, None] * frequencies).mean(0) for p in prompts])

    def timesteps(self, steps: int, modality: str) -> torch.Tensor:
        """From 0, noise, to 1, data."""
        noise = torch.arange(steps, -1, -1) / steps
        s = self.shift[modality]
        return 1 - s * noise / (1 + (s - 1) * noise)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``x0 − noise`` for ``video (B, C, T, H, W)``, ``audio (B, L, BINS)``, ``t_video`` and ``t_audio`` ``(B,)`` and ``text (B, TEXT)``."""
        frames = batch["video"].shape[2:]
        video, audio = self.model(batch["video"].flatten(2).transpose(1, 2), batch["audio"], batch["t_video"], batch["t_audio"], batch["text"])
        return {"video": video.transpose(1, 2).unflatten(2, frames), "audio": audio}

    def sample(
        self, noise: dict[str, torch.Tensor], prompts: list[str], steps: int, seen: Callable[..., None] = lambda *_: None
    ) -> dict[str, torch.Tensor]:
        """Its own Euler loop; ``seen`` is shown each step: latents and times before, latents and times after."""
        x, text, times = dict(noise), self.embed(prompts), {m: self.timesteps(steps, m) for m in noise}
        for i in range(steps):
            now = {f"t_{m}": times[m][i].repeat(len(prompts)) for m in x}
            with torch.no_grad():
                out = self.forward(x | now | {"text": text})
            after = {m: x[m] + (times[m][i + 1] - times[m][i]) * out[m] for m in x}
            seen(x, {m: times[m][i] for m in x}, after, {m: times[m][i + 1] for m in x})
            x = after
        return x

    def lora_for_worker(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names of the trainer → names of the worker: ``layers.0.wide.lora_A.weight`` → ``0/wide/A``."""
        return {f"{n.split('.')[1]}/{n.split('.')[2]}/{n.split('lora_')[1][0]}": v for n, v in state.items()}


class Worker:
    """Its rollout worker, which computes layers by itself."""

    def __init__(self) -> None:
        self.model, self.lora, self.scale = Denoiser(), dict[str, torch.Tensor](), 1.0

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)

    def load_lora(self, tensors: dict[str, torch.Tensor], scale: float) -> None:
        self.lora, self.scale = {n: v.clone() for n, v in tensors.items()}, scale

    def added(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ self.lora[f"{layer}/A"].T @ self.lora[f"{layer}/B"].T)

    @torch.no_grad()
    def denoise(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        handles = []
        for name in {n.rpartition("/")[0] for n in self.lora}:
            module = self.model.layers[int(name[0])][name[2:]]
            handles.append(module.register_forward_hook(lambda _m, args, out, name=name: out + self.added(name, args[0])))
        try:
            frames = batch["video"].shape[2:]
            video, audio = self.model(batch["video"].flatten(2).transpose(1, 2), batch["audio"], batch["t_video"], batch["t_audio"], batch["text"])
        finally:
            for handle in handles:
                handle.remove()
        return {"video": video.transpose(1, 2).unflatten(2, frames), "audio": audio}


def to_media(video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its decoder: pixels ``(B, T, H, W, 3)`` uint8 at 8 frames a second, sound ``(B, 2, N)`` in [−1, 1] at 1200 Hz."""
    pixels = (video[:, :3].permute(0, 2, 3, 4, 1).sigmoid() * 255).byte()
    carrier = torch.cos(torch.arange(100) * torch.tensor([[0.2], [0.7]]))
    level = torch.stack([audio[..., : BINS // 2].mean(-1), audio[..., BINS // 2 :].mean(-1)], 1).tanh()
    return pixels, (level[..., None] * carrier[None, :, None]).flatten(2)


def picture_reward(pixels: torch.Tensor, prompts: list[str]) -> list[float]:
    """One of its reward functions: a number a sample, from the picture and the prompt."""
    ramp = torch.cos(torch.arange(pixels[0].numel()) * 0.37)
    return [float((p.flatten() / 255 * ramp[: p.numel()]).mean()) + 0.01 * (sum(t.encode()) % 97) for p, t in zip(pixels, prompts, strict=True)]


def sound_reward(waves: torch.Tensor, rate: int) -> list[float]:
    """Another: from the sound alone."""
    t = torch.arange(waves.shape[2]) / rate
    return [float((w.mean(0) * torch.cos(200 * t)).mean() + w.square().mean()) for w in waves]
