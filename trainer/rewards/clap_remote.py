"""CLAP through laion-clap 1.1.7, in a process and an environment of its own: it needs numpy < 2 and cannot live beside vllm.

The same sub-score as `ClapScorer`, from checkpoints in LAION's own format. ``ci/laion-clap`` makes the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards import clap_worker
from loudfail.trainer.rewards.clap import TOKENS, agreement, hear
from loudfail.trainer.rewards.scorer import Provenance, Scorer, ScorerFailed, Scores
from loudfail.trainer.rewards.worker import Worker

if TYPE_CHECKING:
    from loudfail.harness.media import Media

VARIABLE = "LOUDFAIL_LAION_CLAP"


def find_python(environment: str | Path | None = None) -> Path:
    """The interpreter of laion-clap's environment.

    Args:
        environment: its folder; default is the variable ``LOUDFAIL_LAION_CLAP``, then ``~/.cache/loudfail/laion-clap``.

    Raises:
        Unavailable: there is none.
    """
    folder = Path(environment or os.environ.get(VARIABLE) or Path.home() / ".cache" / "loudfail" / "laion-clap")
    python = folder / "bin" / "python"
    if not python.is_file():
        raise Unavailable(f"no environment for laion-clap at {folder}: run ci/laion-clap DIR and set {VARIABLE}=DIR")
    return python


class LaionClapScorer(Scorer):
    """CLAP as LAION's package computes it. Starts its worker at once; use it as a context manager or call `stop`.

    Args:
        checkpoint: local ``.pt`` file; the worker unpickles it, so it must be trusted.
        model: audio encoder of the checkpoint, ``HTSAT-tiny`` or ``HTSAT-base``.
        tokenizer: a RoBERTa tokenizer of the size of the checkpoint's vocabulary, or a local directory with one.
        weights: ``real`` unless a test says otherwise.
        environment: see `find_python`.

    Raises:
        Unavailable: the environment does not exist.
        FileNotFoundError: no such checkpoint or tokenizer directory.
        ValueError: the tokenizer does not fit.
        ScorerFailed: the worker did not start.
    """

    name = "laion_clap"
    outputs = {"clap": frozenset({"audio", "prompt"})}

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        model: str,
        tokenizer: Any,
        weights: Literal["real", "random"] = "real",
        environment: str | Path | None = None,
        device: str = "cpu",
        start_seconds: float = 300.0,
        call_seconds: float = 120.0,
    ) -> None:
        python = find_python(environment)
        if not Path(checkpoint).is_file():
            raise FileNotFoundError(f"no file {checkpoint}: laion-clap is loaded from a local checkpoint only")
        if isinstance(tokenizer, str | Path):
            from transformers import AutoTokenizer

            if not Path(tokenizer).is_dir():
                raise FileNotFoundError(f"no directory {tokenizer}: give a local one with RoBERTa's tokenizer files")
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        self.tokenizer, self.weights, self.source = tokenizer, weights, str(checkpoint)
        command = [str(python), "-I", clap_worker.__file__, "--model", model, "--checkpoint", str(checkpoint), "--device", device]
        self.worker = Worker(command, name=self.name, start_seconds=start_seconds, call_seconds=call_seconds)
        size = self.worker.hello["vocabulary"]
        if len(tokenizer) != size or tokenizer("a")["input_ids"] == tokenizer("b")["input_ids"]:
            self.stop()
            raise ValueError(f"the tokenizer knows {len(tokenizer)} tokens, the checkpoint {size}: its files are missing or of another model")

    def __enter__(self) -> LaionClapScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End the worker; gives its exit status."""
        return self.worker.stop()

    def health(self) -> Mapping[str, Any]:
        """The worker's versions, asked of the running worker.

        Raises:
            ScorerFailed: it does not answer.
        """
        return self.worker.call("ping")[0]

    def measure(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        clips, owner = hear(media)
        ids = [tuple(one) for one in self.tokenizer(list(prompts))["input_ids"]]
        if len(set(ids)) != len(set(prompts)):
            raise ScorerFailed(f"{self.name}: {len(set(prompts))} different prompts became {len(set(ids))} id sequences; the tokenizer is broken")
        tokens = self.tokenizer(list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="np")
        audio = self.worker.call("audio", {str(i): clip for i, clip in enumerate(clips)})[1]["embeds"]
        text = self.worker.call("text", {key: tokens[key].astype("int64") for key in ("input_ids", "attention_mask")})[1]["embeds"]
        if len(audio) != len(clips) or len(text) != len(prompts):
            raise ScorerFailed(f"{self.name}: {len(clips)} windows and {len(prompts)} prompts gave {len(audio)} and {len(text)} embeddings")
        return {"clap": agreement(torch.from_numpy(audio), owner, torch.from_numpy(text))}

    def provenance(self) -> tuple[Provenance, ...]:
        versions = self.worker.hello["versions"]
        return (Provenance(self.name, self.weights, self.source, (f"laion_clap.CLAP_Module {versions['laion-clap']} (numpy {versions['numpy']})",)),)
