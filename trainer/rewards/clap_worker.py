"""The process in which laion-clap runs, in an environment of its own.

Imports nothing of this project: that environment has numpy, torch and laion_clap. Messages in both directions are four bytes of length, a JSON
header, then each array named in the header as ``.npy`` bytes of the length given there. A request is ``{"call": name}``; a reply carries ``error`` if
it failed. The process ends when its standard input does.

    python -I clap_worker.py --check                                    import everything, print versions
    python -I clap_worker.py --model HTSAT-base --checkpoint FILE.pt    serve
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import struct
import sys
import traceback
from importlib import metadata
from typing import Any, BinaryIO

import numpy as np

VERSION = "1.1.7"


def write_message(stream: BinaryIO, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
    """Send a header and named arrays."""
    blobs = {}
    for name, array in (arrays or {}).items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        blobs[name] = buffer.getvalue()
    text = json.dumps({**header, "arrays": {name: len(blob) for name, blob in blobs.items()}}).encode()
    stream.write(struct.pack(">I", len(text)) + text)
    for blob in blobs.values():
        stream.write(blob)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Receive what `write_message` sent.

    Raises:
        EOFError: the other side is gone.
    """
    header = json.loads(_read(stream, struct.unpack(">I", _read(stream, 4))[0]))
    arrays = {name: np.load(io.BytesIO(_read(stream, size)), allow_pickle=False) for name, size in header.pop("arrays").items()}
    return header, arrays


def _read(stream: BinaryIO, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = stream.read(left)
        if not part:
            raise EOFError("the other side closed the pipe")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def import_laion_clap() -> Any:
    """laion_clap itself, offline, at the version that this file knows.

    Raises:
        RuntimeError: another version.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # it asks the hub for three tokenizers at import; none of them is used here
    sys.argv = sys.argv[:1]  # some releases parse the program's arguments at import
    if metadata.version("laion-clap") != VERSION:
        raise RuntimeError(f"laion-clap is {metadata.version('laion-clap')}; want {VERSION}")
    import torch

    try:
        importlib.import_module("torchvision")  # imported by laion_clap, not used for audio
    except RuntimeError:  # its operators are built for another torch: declare the two that its import needs to find, and try again
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # it undefines them when it is collected
    import laion_clap

    return laion_clap


def build(model: str, device: str) -> Any:
    """An unfused `CLAP_Module` whose text encoder has roberta-base's layout and random weights: the checkpoint replaces all, and no hub is asked."""
    laion_clap = import_laion_clap()
    import transformers

    original = transformers.RobertaModel.__dict__.get("from_pretrained")
    layout = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
    transformers.RobertaModel.from_pretrained = staticmethod(lambda *_, **__: transformers.RobertaModel(layout))
    try:
        return laion_clap.CLAP_Module(enable_fusion=False, device=device, amodel=model).eval()
    finally:
        if original is None:
            del transformers.RobertaModel.from_pretrained
        else:
            transformers.RobertaModel.from_pretrained = original


def answer(clap: Any, call: str, arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Answer one request: ``ping``, ``audio`` (arrays ``0``, ``1``, … of one window each) or ``text`` (``input_ids``, ``attention_mask``).

    Raises:
        ValueError: an unknown request, or a window that laion_clap would crop at random or take for a batch.
    """
    import torch

    if call == "ping":
        names = ("laion-clap", "torch", "transformers", "numpy")
        return {"vocabulary": clap.model.text_branch.config.vocab_size, "versions": {name: metadata.version(name) for name in names}}, {}
    with torch.no_grad():
        if call == "audio":
            clips = [arrays[str(i)] for i in range(len(arrays))]
            for clip in clips:
                if clip.ndim != 1 or clip.dtype != np.float32 or not 0 < clip.shape[0] <= 480_000:
                    raise ValueError(f"window {clip.shape} {clip.dtype}; want (1 to 480000,) float32")
            return {}, {"embeds": np.asarray(clap.get_audio_embedding_from_data(x=clips, use_tensor=False))}
        if call == "text":
            tokens = {name: torch.from_numpy(array) for name, array in arrays.items()}
            return {}, {"embeds": np.asarray(clap.get_text_embedding([""] * len(tokens["input_ids"]), tokenizer=lambda _: tokens))}
    raise ValueError(f"unknown request {call!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="import everything, print versions, end")
    parser.add_argument("--model", help="audio encoder of the checkpoint: HTSAT-tiny or HTSAT-base")
    parser.add_argument("--checkpoint", help="local .pt file; it is unpickled, so it must be trusted")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.check:
        import_laion_clap()
        print(*(f"{name} {metadata.version(name)}" for name in ("laion-clap", "torch", "numpy", "transformers")))
        return 0

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # laion_clap prints to standard output, which is the pipe
    try:
        clap = build(options.model, options.device)
        clap.load_ckpt(options.checkpoint, verbose=False)  # strict: every weight comes from the checkpoint
        write_message(replies, *answer(clap, "ping", {}))
    except BaseException as error:
        traceback.print_exc()
        write_message(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    while True:
        try:
            request, arrays = read_message(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            reply = answer(clap, request["call"], arrays)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}, {}
        write_message(replies, *reply)


if __name__ == "__main__":
    sys.exit(main())
