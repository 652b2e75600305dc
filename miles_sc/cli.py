"""The command ``miles-sc``."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns 0, 1 for an error told in one line, 130 after Ctrl-C; argparse exits with 2."""
    parser = argparse.ArgumentParser(prog="miles-sc", description="Score centering for off-policy RL of language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, (text, _, _) in _COMMANDS.items()}
    argv = sys.argv[1:] if argv is None else list(argv)
    # only the chosen command's flags are built: some of them import a model library
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen in _COMMANDS:
        _COMMANDS[chosen][1](parsers[chosen])
    try:
        args = parser.parse_args(argv)
        return _COMMANDS[args.command][2](args, parsers[args.command])
    except KeyboardInterrupt:
        print("miles-sc: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("MILES_SC_TRACEBACK"):
            traceback.print_exc()
        print(f"miles-sc: error: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(error: BaseException) -> str:
    """What went wrong, without the layers it came through."""
    while (cause := getattr(error, "cause", None)) is not None and isinstance(cause, BaseException):
        error = cause  # Ray hands a worker's exception on as the cause of its own
    text = " ".join(str(error).split()) or "no message"
    known = isinstance(error, ValueError | OSError)
    return text if known else f"{type(error).__name__}: {text} (MILES_SC_TRACEBACK=1 shows where)"


def _train_flags(parser: argparse.ArgumentParser) -> None:
    from miles_sc.trainer.arguments import add_train_arguments

    add_train_arguments(parser)


def _train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.arguments import finish_train_arguments
    from miles_sc.trainer.cluster import Actors, ray_session
    from miles_sc.trainer.compare import planned_runs
    from miles_sc.trainer.driver import Interrupted, train
    from miles_sc.trainer.report import write_report

    finish_train_arguments(args, parser)
    runs = planned_runs(args)
    try:
        with ray_session(), Actors(args.actor_num_gpus_per_node, overlapping=args.train_async) as actors:
            for own, directory, title in runs:
                train(own, directory, actors, title=title)
    except Interrupted as stopped:
        print(f"miles-sc: {stopped}", file=sys.stderr)
        return 130
    print(f"report: {write_report(Path(args.output_dir))}")
    return 0


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="output directory of a run or of a comparison")


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.report import write_report

    print(f"report: {write_report(args.directory)}")
    return 0


_COMMANDS = {
    "train": ("train a model by reinforcement learning on this machine", _train_flags, _train),
    "report": ("draw the report of runs that are already there", _report_flags, _report),
}

if __name__ == "__main__":
    sys.exit(main())
