"""gdlab lab | dashboard | run: all that `make` does, for those who installed with pip or conda."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn
from urllib.parse import urlencode

import gdlab

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (the run failed) or 2 (the words make no sense)."""
    parser = _parser()
    words, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if words.command != "run" and rest:
        parser.error(f"{words.command} does not know {rest[0]}: see `gdlab {words.command} --help`.")
    try:
        return words.does(words, rest)
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with one sentence, without the usage that would bury it."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}{'' if message.endswith('.') else '.'}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gdlab", description="Gradient descent on many workers, for real.")
    parser.add_argument("--version", action="version", version=f"gdlab {gdlab.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, does, says in (
        ("lab", _lab, "open the notebooks in JupyterLab"),
        ("dashboard", _dashboard, "serve the notebooks as pages, without code"),
    ):
        server = commands.add_parser(name, help=says, description=says.capitalize() + ".")
        server.add_argument("--port", type=_port, help="where to serve (default: the first free one)")
        server.add_argument("--browser", action=argparse.BooleanOptionalAction, default=None,
                            help="open a browser (default: where there is a screen)")  # fmt: skip
        server.add_argument("notebooks", nargs="?", help="a folder of notebooks (default: gdlab's own)")
        server.set_defaults(does=does)
    run = commands.add_parser(
        "run",
        help="run one experiment and print what came of it",
        description="Run one experiment and print what came of it.",
        usage="gdlab run [--backend local|virtual] [--folder FOLDER] [--json] [--FIELD VALUE ...]",
        add_help=False,
        allow_abbrev=False,
    )
    run.add_argument("-h", "--help", action="store_true", help="show this and leave")
    run.add_argument("--backend", default="local", help="local (real processes; the default) or virtual (simulated)")
    run.add_argument("--folder", help="where to keep the run (default: a new folder in runs/)")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    run.set_defaults(does=_run, parser=run)
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 1 to 65535")
    return port


def _lab(words: argparse.Namespace, _: list[str]) -> int:
    return _serve("serve_lab", words)


def _dashboard(words: argparse.Namespace, _: list[str]) -> int:
    return _serve("serve_dashboard", words)


def _serve(name: str, words: argparse.Namespace) -> int:
    from gdlab.dashboard import serve

    try:
        getattr(serve, name)(words.port, words.browser, words.notebooks)
    except serve.ServeError as error:
        return _sorry(error)
    return 0


def _run(words: argparse.Namespace, rest: list[str]) -> int:
    if words.help:
        words.parser.print_help()
        print("\n" + _fields())
        return 0
    try:
        experiment = experiment_from(rest)
    except gdlab.ExperimentError as error:
        return _sorry(error)
    try:
        trace = gdlab.run(experiment, backend=words.backend, **({"folder": words.folder} if words.folder else {}))
    except gdlab.RankFailed as error:
        return _sorry(error, FAILED)
    except ValueError as error:
        return _sorry(error)
    except OSError as error:
        return _sorry(f"The run's folder {error.filename or ''} cannot be used ({error.strerror}): name another.")
    summary = trace.summary()
    if words.json:
        import json

        print(json.dumps(summary, default=float))
    else:
        from gdlab.views.style import caption

        print(f"{experiment.label}\n{caption(trace.environment)}\nkept in {trace.folder}")
        for name, value in summary.items():
            print(f"  {name.replace('_', ' '):<22} {_value(value)}")
    return 0


def experiment_from(words: list[str]) -> gdlab.Experiment:
    """Read an Experiment from `--name value` and `--part.name=value`; raises ExperimentError."""
    return gdlab.Experiment.from_query(urlencode(_pairs(words)))


def _pairs(rest: list[str]) -> list[tuple[str, str]]:
    """Read `--name value` and `--name=value` as pairs; raises ExperimentError for anything else."""
    pairs, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise gdlab.ExperimentError(f"{word!r} stands alone: write flags as --name value.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise gdlab.ExperimentError(f"--{name} needs a value: write --{name} VALUE.")
            value = words.pop(0)
        pairs.append((name.replace("-", "_"), value))
    return pairs


def _fields() -> str:
    lines = [
        "The Experiment's fields, with their defaults. A part's own fields follow a dot:",
        "  gdlab run --workers 4 --strategy Async --strategy.staleness_bound 3",
        "",
    ]
    for name, field in gdlab.Experiment.model_fields.items():
        if name != "kind":
            lines.append(f"  --{name:<16} {field.description} ({field.default})")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _sorry(error: Exception | str, code: int = BAD_INPUT) -> int:
    print(" ".join(str(error).split()), file=sys.stderr)
    return code
