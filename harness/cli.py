"""The command line. Exit codes are pytest's: 0 holds, 1 violated, 2 interrupted, 3 internal error, 4 usage, 5 nothing ran."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loudfail.harness import environment
from loudfail.harness import options as opts
from loudfail.harness.upgrade import add_arguments as add_upgrade_arguments

HOLDS, VIOLATED, INTERRUPTED, USAGE, NOTHING = 0, 1, 2, 4, 5

DESCRIPTION = "Makes the silent failures of joint audio-video RL post-training loud, before the multi-GPU run is paid for."
PORT_HELP = "name of a port (see `loudfail list`) or package.module:Class"
#: Verbs that live in packages which the harness does not import: verb → module and what it needs.
ELSEWHERE = {"golden": "loudfail.golden.cli", "train": "loudfail.trainer.train", "demo": "loudfail.trainer.demo"}


class _Parser(argparse.ArgumentParser):
    """argparse with pytest's exit code for usage errors, and nearest names for a wrong verb."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def _processes_given(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; 0 is this one alone")
    return int(text)


K_HELP = """run only checks whose id or seam matches, as pytest's -k: `objective::` is that link, `objective` all that needs that seam too;
the certificate is then not complete"""


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="loudfail", description=DESCRIPTION, epilog="Exit codes: 0 holds, 1 violated, 2 interrupted, 3 internal error, 4 usage, 5 nothing ran."
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    gate = verbs.add_parser("gate", help="check a port, and certify it", description="Run every invariant on a port. Writes records with --out.")
    gate.add_argument("port", metavar="PORT", help=PORT_HELP)
    opts.add_options(gate, opts.PORT_OPTIONS, opts.RUN_OPTIONS)
    gate.add_argument("-k", metavar="EXPRESSION", help=K_HELP)
    gate.add_argument(
        "-n", metavar="N", type=_processes_given, help="spread over N processes, 0 for this one alone (default: up to 4, by processors)"
    )
    gate.set_defaults(act=_gate)

    faults = verbs.add_parser(
        "faults", help="prove that the gate would have noticed", description="Inject each fault; the checks named for it must fail."
    )
    faults.add_argument("port", metavar="PORT", help=PORT_HELP)
    faults.add_argument("fault", metavar="FAULT", nargs="*", help="ids of faults; all that apply to the port, if none is given")
    opts.add_options(faults, opts.PORT_OPTIONS, {"--out": dict(metavar="DIR", help="folder for faults.json")})
    faults.add_argument("-k", metavar="TEXT", help="only faults whose id contains the text")
    faults.set_defaults(act=_faults)

    listing = verbs.add_parser("list", help="what is checked and why", description="Ports, invariants and faults; or one of them in full.")
    listing.add_argument("id", metavar="ID", nargs="?", help="an invariant or a fault to show in full")
    listing.add_argument("--json", action="store_true", help="for machines")
    listing.set_defaults(act=_list)

    env = verbs.add_parser("env", help="versions and devices of this environment")
    env.add_argument("--json", action="store_true", help="for machines")
    env.set_defaults(act=_env)

    require = verbs.add_parser(
        "require",
        help="exit 0 only if a certificate fits",
        description="Compare a certificate with this environment and configuration. What is not given is taken to be as certified.",
    )
    require.add_argument("certificate", metavar="CERT", type=Path, help="a gate.json")
    require.add_argument("--port", metavar="PORT", help=f"{PORT_HELP}; may be left out for a port that is registered")
    opts.add_options(require, opts.PORT_OPTIONS)
    require.set_defaults(act=_require)

    upgrade = verbs.add_parser(
        "upgrade",
        help="what other versions of the packages change",
        description="Gate and goldens of a port here and in an environment beside this one with other versions; a drift table of what differs.",
    )
    add_upgrade_arguments(upgrade)
    upgrade.set_defaults(act=_upgrade)

    new = verbs.add_parser("new", help="scaffold of a port", description="Write a port with its test and a CI workflow, ready to run.")
    new.add_argument("name", metavar="NAME", help="name of the model, such as my-model; a folder of that name is made")
    new.set_defaults(act=_new)

    # Their arguments are their own; they are listed here for `loudfail --help`.
    verbs.add_parser("golden", add_help=False, help="record, verify, diff and list golden traces")
    verbs.add_parser("train", add_help=False, help="the reference trainer")
    verbs.add_parser("demo", add_help=False, help="faulty runs that look healthy beside the right one: a picture")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; those of the process if None.

    Returns:
        The exit code. Usage errors found by argparse raise `SystemExit` with code 4.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if argv and argv[0] in ELSEWHERE:
            return _elsewhere(argv[0], argv[1:])
        parser = build_parser()
        parsed, rest = parser.parse_known_args(argv)
        if rest and hasattr(parsed, "fault") and not any(value.startswith("-") for value in rest):
            parsed.fault += rest  # argparse takes the faults of `faults PORT --tp 1 FAULT` for unknown ones
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        if parsed.version:
            from importlib.metadata import version

            print(version("loudfail"))
            return HOLDS
        if parsed.verb is None:
            parser.print_help()
            return USAGE
        return int(parsed.act(parsed))
    except KeyboardInterrupt:
        _close_worlds()
        print("loudfail: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
    except opts.UsageProblem as error:
        return _complain(str(error))


def command() -> NoReturn:
    """`main` as a process of its own."""
    code = main()
    environment.skip_teardown(code)
    sys.exit(code)


def _complain(message: str, code: int = USAGE) -> int:
    print(f"loudfail: error: {message}", file=sys.stderr)
    return code


def _close_worlds() -> None:
    if (world := sys.modules.get("loudfail.harness.world")) is not None:
        world.close_all()


def _elsewhere(verb: str, argv: list[str]) -> int:
    name = ELSEWHERE[verb]
    try:
        act: Callable[[list[str]], int] = importlib.import_module(name).main
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return _complain(f"`loudfail {verb}` is not part of this installation ({name} is missing)")
    return int(act(argv) or 0)


# -- gate ----------------------------------------------------------------------------------------------------------------------------------------


def _gate(parsed: argparse.Namespace) -> int:
    """pytest on the installed invariants with our plugin, without the configuration of the folder that it is run from."""
    chosen = opts.from_namespace(parsed)  # bad values are found before pytest is imported
    import pytest

    from loudfail.harness import registry
    from loudfail.harness.progress import GateTerminal

    arguments = [
        "--pyargs",
        registry.INVARIANTS_PACKAGE,
        "-c",
        os.devnull,
        "--rootdir",
        os.getcwd(),
        "--noconftest",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
    ]
    arguments += ["--port", chosen.port]
    for flag in (*opts.PORT_OPTIONS, *opts.RUN_OPTIONS):
        value = getattr(parsed, opts.destination(flag))
        for one in value if isinstance(value, list) else [value] if value is not None else []:
            arguments.append(f"{flag}={one}")
    arguments += [f"-k={parsed.k}"] if parsed.k else []
    processes = parsed.n if parsed.n is not None else 0 if parsed.k else _processes(chosen)
    arguments += [f"-n={processes}"] if processes else []
    terminal = GateTerminal()
    code = int(pytest.main(arguments, plugins=[terminal]))
    if code == NOTHING and not terminal.links:
        why = f"no check's id matches {parsed.k!r}" if parsed.k else "no check ran"
        print(f"loudfail: {why}; see `loudfail list`", file=sys.stderr)
    return code


def _processes(chosen: opts.Options) -> int:
    """Over how many processes to spread a whole gate: one for the actor's checks, and one for the rollout at each degree, as far as there are
    processors. A port without an engine has too little to do for that, and of a large model there is room for one."""
    from importlib.util import find_spec

    from loudfail.harness import registry
    from loudfail.harness.port import offers

    try:
        worth = chosen.scale == "tiny" and offers(registry.find_port(chosen.port), "engine")
    except (registry.UnknownId, ImportError):
        return 0  # reported where the port is needed
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(processors, 1 + len(chosen.degrees), 4) if worth and processors > 1 and find_spec("xdist") else 0


# -- faults --------------------------------------------------------------------------------------------------------------------------------------


def _faults(parsed: argparse.Namespace) -> int:
    from loudfail.harness import faultrun

    return faultrun.run(opts.from_namespace(parsed), parsed.fault, parsed.k or "")


# -- list, env -----------------------------------------------------------------------------------------------------------------------------------


def _list(parsed: argparse.Namespace) -> int:
    from loudfail.harness import registry

    invariants, faults = registry.invariants(), registry.faults()
    catchers: dict[str, list[str]] = {invariant.id: [] for invariant in invariants}
    causes: dict[str, dict[str, None]] = {invariant.id: {} for invariant in invariants}
    for fault in faults:
        for name in fault.catches:
            catchers[name].append(fault.id)
            causes[name] |= {fault.cause: None} if fault.cause else {}
    records: dict[str, dict[str, Any]] = {
        i.id: {
            "id": i.id, "claim": i.claim, "seams": list(i.seams), "per_degree": i.per_degree, "examples": i.examples, "scales": list(i.scales),
            "usual_causes": list(causes[i.id]), "broken_by": catchers[i.id], "doc": i.doc,
        }
        for i in invariants
    }  # fmt: skip
    broken: dict[str, dict[str, Any]] = {
        f.id: {
            "id": f.id, "claim": f.claim, "seams": list(f.seams), "source": f.source, "catches": list(f.catches), "degrees": list(f.degrees),
            "ports": list(f.ports), "cause": f.cause, "doc": f.doc,
        }
        for f in faults
    }  # fmt: skip
    if parsed.id is not None and "::" not in parsed.id:  # a bare name, if only one link has it
        named = [one for one in (*records, *broken) if one.split("::")[1] == parsed.id]
        parsed.id = named[0] if len(named) == 1 else parsed.id
    if parsed.id is not None:
        both = records | broken
        if parsed.id not in both:
            return _complain(str(registry.nearest(parsed.id, both, "invariant or fault")))
        chosen = {name: one[parsed.id] for name, one in (("invariant", records), ("fault", broken)) if parsed.id in one}
        print(json.dumps(chosen, indent=1, ensure_ascii=False) if parsed.json else "\n\n".join(_full(one, both) for one in chosen.values()))
        return HOLDS
    if parsed.json:
        record = {"schema": "loudfail.list/1", "ports": registry.ports(), "invariants": list(records.values()), "faults": list(broken.values())}
        print(json.dumps(record, indent=1, ensure_ascii=False))
        return HOLDS
    print(f"{len(registry.ports())} ports")
    for name, target in registry.ports().items():
        print(f"  {name:<16} {target}")
    print(f"\n{len(records)} invariants")
    for one in records.values():
        print(f"  {one['id']}{' [each TP degree]' if one['per_degree'] else ''}\n      {one['claim']}")
    print(f"\n{len(broken)} faults")
    for one in broken.values():
        print(f"  {one['id']}\n      {one['claim']}")
    return HOLDS


def _full(record: dict[str, Any], known: Mapping[str, Mapping[str, Any]]) -> str:
    """A record for people: its docstring, the other fields, and with their claims the faults that break it or the invariants that catch it."""
    lines = [record["id"], "", record["doc"], ""]
    for key, value in record.items():
        if key in ("broken_by", "catches"):
            lines += [f"{key.replace('_', ' ')}: {len(value)}", *(f"  {name}\n      {known[name]['claim']}" for name in value)]
        elif key not in ("id", "claim", "doc"):
            lines.append(f"{key.replace('_', ' ')}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return "\n".join(lines)


def _env(parsed: argparse.Namespace) -> int:
    record = environment.describe()
    if parsed.json:
        print(json.dumps({"schema": "loudfail.env/1"} | record, indent=1))
        return HOLDS
    for key, value in record.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for name, version in value.items():
                print(f"  {name:<14} {version}")
        else:
            print(f"{key:<16} {value}")
    return HOLDS


# -- require -------------------------------------------------------------------------------------------------------------------------------------


def _require(parsed: argparse.Namespace) -> int:
    from loudfail.harness import certificate, registry
    from loudfail.harness.world import without_preloading

    try:
        content = certificate.read(parsed.certificate)
    except certificate.Refused as error:
        return _complain(str(error), USAGE if not parsed.certificate.exists() else VIOLATED)
    certified = content["fingerprint"].get("port") or {}
    port = parsed.port
    if port is None:
        # The class that the certificate names is never imported; one that is registered in this environment under that name is.
        port = next((name for name, target in registry.ports().items() if target == certified.get("class")), None)
        if port is None:
            return _complain(f"the certificate is for {certified.get('class')}, which is no registered port; say which one is meant with --port")
    weights = certified.get("weights")
    as_certified = {
        "tp": ",".join(map(str, content["fingerprint"].get("degrees") or [1])), "device": certified.get("device"), "scale": certified.get("scale"),
        "weights": None if weights == "built-in" else weights, "dtype": certified.get("dtype"),
        "attention": None if certified.get("attention") == "plainest" else certified.get("attention"),
    }  # fmt: skip
    chosen = opts.parse(
        {"port": port} | {key: given if (given := getattr(parsed, key)) is not None else value for key, value in as_certified.items()}
    )
    try:
        cls = registry.find_port(chosen.port)
        with without_preloading():
            instance = chosen.construct(cls)
    except (registry.UnknownId, ImportError, ValueError) as error:
        return _complain(str(error))
    except Exception as error:  # of the port
        return _complain(f"{chosen.port}: the port cannot be constructed: {type(error).__name__}: {error}")
    try:
        certificate.require(parsed.certificate, certificate.fingerprint(instance, chosen.degrees))
        instance.close()
    except certificate.Refused as error:
        return _complain(str(error), VIOLATED)
    except Exception as error:  # of the port
        return _complain(f"{chosen.port}: the port cannot be described or closed: {type(error).__name__}: {error}")
    counts = ", ".join(f"{number} {status}" for status, number in content["counts"].items() if number)
    degrees = ", ".join(map(str, content["fingerprint"]["degrees"]))
    print(f"{parsed.certificate} fits: {content['port']}, TP {degrees}, {certified.get('dtype')}, {counts}")
    return HOLDS


# -- upgrade ------------------------------------------------------------------------------------------------------------------------------------


def _upgrade(parsed: argparse.Namespace) -> int:
    from loudfail.harness import upgrade

    return upgrade.run(parsed)


# -- new -----------------------------------------------------------------------------------------------------------------------------------------


def _new(parsed: argparse.Namespace) -> int:
    from loudfail.harness import scaffold

    folder, module, cls = scaffold.write(parsed.name, Path.cwd())
    print(f"{folder.name}/ is ready. Try it:\n  cd {folder.name} && loudfail gate {module}:{cls}")
    return HOLDS


if __name__ == "__main__":
    command()
