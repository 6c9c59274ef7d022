"""Options that say what is run: shared by the command line and the pytest plugin."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from loudfail.harness import environment
from loudfail.harness.port import SEAMS

DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}

#: Option → arguments of ``add_argument``; the same in both front doors. Every default is None, so that what was not given can be told.
PORT_OPTIONS: dict[str, dict[str, Any]] = {
    "--tp": dict(metavar="1,2,4", help="tensor-parallel degrees (default 1,2,4)"),
    "--device": dict(choices=("auto", "cpu", "cuda"), help="device of the actor and the ranks (default auto: cuda where there is one)"),
    "--scale": dict(metavar="NAME", help="size of the model: tiny, wide, or wide-N with N blocks (default tiny)"),
    "--weights": dict(metavar="DIR", help="checkpoint folder to use instead of the built-in weights"),
    "--dtype": dict(choices=tuple(DTYPES), help="float32 (default) or bfloat16"),
    "--attention": dict(metavar="NAME", help="attention backend of the rollout engine, by its own name, such as FLASH_ATTN (default: its plainest)"),
}
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "--require": dict(action="append", metavar="SEAM|all", help="fail if a check of this seam is uncovered or unavailable; may be repeated"),
    "--expect": dict(metavar="FILE", help="TOML file of known failures, id = reason"),
    "--out": dict(metavar="DIR", help="folder for report.json, gate.json, summary.md, junit.xml and report.html"),
    "--examples": dict(type=int, metavar="N", help="inputs drawn per check, instead of the number that each declares"),
    "--loudfail-seed": dict(type=int, metavar="N", help="draw other inputs (default 0)"),
}


class UsageProblem(ValueError):
    """The command cannot be carried out as given; the message says why and what would do."""


@dataclass
class Options:
    """What is run, checked and with defaults filled in.

    Attributes:
        port: name of a port or ``package.module:Class``.
        degrees: tensor-parallel degrees, in the order given.
        require: seams whose checks must really run; ``all`` is every one.
        expect: id (with or without degree) → why it is known to be violated.
        out: folder for the records, or None.
        examples: drawn inputs per check, or None for what each declares.
        seed: draws other inputs when it changes.
        given: options that differ from their defaults, as text, for the line that runs a check again.
    """

    port: str
    degrees: tuple[int, ...] = (1, 2, 4)
    device: str = "auto"
    scale: str = "tiny"
    weights: str | None = None
    dtype: str = "float32"
    attention: str = ""
    require: tuple[str, ...] = ()
    expect: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    examples: int | None = None
    seed: int = 0
    given: tuple[str, ...] = ()

    def construct(self, cls: type) -> Any:
        """The port, on the device that ``auto`` means here, where float32 is float32 from now on."""
        environment.use_exact_float32()
        device = self.device
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        port = cls(scale=self.scale, weights=self.weights, device=device, dtype=self.dtype)
        if self.attention:
            port.attention = self.attention
        return port


def parse(values: Mapping[str, Any]) -> Options:
    """Check option values (keys as in `Options`, but ``tp`` for the degrees and ``expect`` as a path) and fill in defaults.

    Raises:
        UsageProblem: a value makes no sense; nothing was run or written.
    """
    given = {key: value for key, value in values.items() if value is not None}
    options = Options(port=str(given["port"]))
    for name in ("device", "scale", "attention", "examples", "seed"):
        setattr(options, name, given.get(name, getattr(options, name)))
    if "tp" in given:
        options.degrees = parse_degrees(given["tp"])
    if given.get("dtype", "fp32") not in DTYPES:
        raise UsageProblem(f"--dtype {given['dtype']}: is none of {', '.join(DTYPES)}")
    if not isinstance(given.get("weights", ""), str):
        raise UsageProblem(f"--weights {given['weights']}: no such folder")
    if "dtype" in given:
        options.dtype = DTYPES[given["dtype"]]
    if "weights" in given:
        options.weights = given["weights"]
        if not Path(given["weights"]).is_dir():
            raise UsageProblem(f"--weights {given['weights']}: no such folder")
    if options.examples is not None and options.examples < 1:
        raise UsageProblem(f"--examples {options.examples}: at least 1 input must be drawn")
    options.require = tuple(given.get("require", ()))
    if unknown := [seam for seam in options.require if seam not in (*SEAMS, "all")]:
        raise UsageProblem(f"--require {unknown[0]}: no such seam; there are {', '.join(SEAMS)} and all")
    if "expect" in given:
        options.expect = read_expected(Path(given["expect"]))
    if given.get("out") is not None and not str(given["out"]):
        raise UsageProblem("--out is empty; name a folder")
    if "out" in given:
        options.out = Path(given["out"])
    defaults = Options(options.port)
    again = ((flag, destination(flag)) for flag in ("--device", "--scale", "--weights", "--dtype", "--attention", "--examples", "--loudfail-seed"))
    changed = [(flag, getattr(options, name)) for flag, name in again if getattr(options, name) != getattr(defaults, name)]
    options.given = tuple(f"{flag} {shlex.quote(str(value))}" for flag, value in changed)
    return options


def add_options(parser: argparse.ArgumentParser, *tables: Mapping[str, dict[str, Any]]) -> None:
    """Add the options of the tables to a command line parser; ``--seed`` is short for ``--loudfail-seed`` there."""
    for table in tables:
        for flag, keywords in table.items():
            names = [flag, "--seed"] if flag == "--loudfail-seed" else [flag]
            parser.add_argument(*names, dest=destination(flag), **keywords)


def destination(flag: str) -> str:
    """Name of an option's value: ``--loudfail-seed`` → ``seed``."""
    return flag.removeprefix("--").removeprefix("loudfail-")


def from_namespace(namespace: argparse.Namespace) -> Options:
    """`parse` of a command line's values."""
    names = {"tp", *(one.name for one in fields(Options))}
    return parse({key: value for key, value in vars(namespace).items() if key in names})


def parse_degrees(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` → ``(1, 2, 4)``.

    Raises:
        UsageProblem: it is not a list of different positive numbers.
    """
    try:
        degrees = tuple(int(part) for part in text.split(","))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1 or len(set(degrees)) < len(degrees):
        raise UsageProblem(f"--tp {text}: want different positive degrees with commas between, such as 1,2,4")
    return degrees


def read_expected(path: Path) -> dict[str, str]:
    """Known failures of a TOML file: ``"sync::some_claim" = "reason"`` or, for one degree, ``"sync::some_claim[tp2]" = "reason"``.

    Raises:
        UsageProblem: it cannot be read, or an entry has no reason.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageProblem(f"--expect {path}: {error}") from None
    for key, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip():
            raise UsageProblem(f'--expect {path}: {key} needs a reason: "{key}" = "why it is known to fail"')
    return entries


def prepare_folder(out: Path, stale: Iterable[str], *, option: str = "--out") -> None:
    """Make the folder, see that it can be written, and remove records of an earlier run, which would outlive an interrupted one.

    Raises:
        UsageProblem: it cannot be made, read or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        os.listdir(out)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".loudfail-"):
            pass
        for name in stale:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageProblem(f"{option} {out}: cannot be used: {error.strerror or error}") from None
