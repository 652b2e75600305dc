"""The command ``miles-sc doctor``: whether an endpoint delivers what a run needs, and what to do where it does not."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles_sc.config import ScoreCenteringConfig
from miles_sc.hosts.startup import HOSTS
from miles_sc.rollout.engines.sglang.client import ClientSettings
from miles_sc.rollout.model_directory import model_vocabulary
from miles_sc.rollout.probe import EndpointReport, Examination, Finding, Verdict, examine_endpoint, small_prompt

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.FAILED: "bold red", Verdict.UNKNOWN: "yellow"}
_MODES = ("selected", "support")


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``miles-sc doctor``; the sampler's have the names that they have in training."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--endpoint", metavar="URL", help="a server or a router, as training would ask it")
    what.add_argument("--host", choices=HOSTS, help="whether the plugin enters this host, here and in Ray's workers")
    add("--engine", metavar="URL", help="the server behind it (default: those that a router lists)")
    add("--route", choices=("native", "chat", "both"), default="both", help="/generate, chat completions (default: %(default)s)")
    add(
        "--mode", choices=(*_MODES, "both"),
        help="candidates of unfiltered sampling, support of filtered (default: what the sampler's flags call for)",
    )  # fmt: skip
    add(
        "--rollout-top-logprobs-num", type=int, default=128, metavar="K",
        help="candidates recorded per generated token (default: %(default)s)",
    )  # fmt: skip
    add("--rollout-temperature", type=float, default=1.0, metavar="T", help="default: %(default)s")
    add("--rollout-top-p", type=float, default=1.0, metavar="P", help="default: %(default)s")
    add("--rollout-top-k", type=int, default=-1, metavar="N", help="-1 is unfiltered (default: %(default)s)")
    add("--model", metavar="NAME", help="name that chat calls ask for (default: what the endpoint serves)")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab-size", type=int, metavar="V", help="of the model (default: from its directory, if it is on this machine)"
    )
    vocabulary.add_argument("--hf-checkpoint", type=Path, metavar="DIR", help="the model's directory: vocabulary and tokenizer")
    add("--timeout", type=float, default=30.0, metavar="S", help="seconds for one answer (default: %(default)s)")
    add("--json", action="store_true", help="print the findings as JSON")


def doctor(args: argparse.Namespace) -> int:
    """Asks, prints and judges.

    Returns:
        0 where every check holds, 1 where one fails or could not be made, 2 for flags that are wrong or contradict each other.

    Raises:
        EngineError: nothing answers at the endpoint.
    """
    if args.host is not None:
        from miles_sc.hosts.report import print_host

        if args.json:
            print("miles-sc doctor: error: --json with --host: it prints lines; leave one out", file=sys.stderr)
            return 2
        return print_host(args.host, Console(soft_wrap=True))
    try:
        wanted = _examination(args)
    except ValueError as error:
        print(f"miles-sc doctor: error: {error}", file=sys.stderr)
        return 2
    report = asyncio.run(examine_endpoint(args.endpoint, wanted))
    if args.json:
        print(json.dumps(_as_json(args.endpoint, report), indent=1))
    else:
        _print(args.endpoint, wanted, report, Console())
    return 0 if report.holds else 1


def _examination(args: argparse.Namespace) -> Examination:
    """
    Raises:
        ValueError: the flag, its value and what to set.
    """
    for flag, url in (("--endpoint", args.endpoint), ("--engine", args.engine)):
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{flag} {url}: give http://HOST:PORT")
    for flag, value in (("--rollout-top-logprobs-num", args.rollout_top_logprobs_num), ("--vocab-size", args.vocab_size)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    if not args.timeout > 0:
        raise ValueError(f"--timeout {args.timeout}: give a number of seconds above 0")
    vocab_size, checkpoint = args.vocab_size, args.hf_checkpoint
    if checkpoint is not None:
        vocab_size = model_vocabulary(checkpoint)
        if vocab_size is None:
            raise ValueError(f"--hf-checkpoint {checkpoint}: give a directory whose config.json has a vocab_size")
    config = ScoreCenteringConfig.from_args(args)
    modes = _MODES if args.mode == "both" else (args.mode or config.mode,)
    return Examination(
        routes=("native", "chat") if args.route == "both" else (args.route,),
        configs=[_in_mode(config, mode) for mode in modes],
        client=ClientSettings(request_timeout=args.timeout, attempts=1),
        prompt_ids=small_prompt if checkpoint is None else lambda _: _tokenized(checkpoint),
        model=args.model,
        vocab_size=vocab_size,
        engine=args.engine,
    )


def _in_mode(config: ScoreCenteringConfig, mode: str) -> ScoreCenteringConfig:
    if config.mode == mode:
        return config
    return replace(config, top_p=1.0, top_k=-1 if mode == "selected" else config.top_logprobs_num)


def _tokenized(checkpoint: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)("Say something.")["input_ids"]


# --- what is printed


def _as_json(endpoint: str, report: EndpointReport) -> dict[str, object]:
    def plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
        return [{**vars(finding), "verdict": finding.verdict.value} for finding in findings]

    return {
        "endpoint": endpoint,
        "holds": report.holds,
        "findings": plain(report.findings),
        "engines": {url: plain(findings) for url, findings in report.engines.items()},
    }


def _print(endpoint: str, wanted: Examination, report: EndpointReport, console: Console) -> None:
    console.print(Text(f"{endpoint}: {_description(report)}"), soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False, expand=True)
    for heading, options in (
        ("route", {"no_wrap": True}), ("check", {"max_width": 12}), ("verdict", {"max_width": 10}),
        ("what came, what to do", {"ratio": 1, "overflow": "fold"}),
    ):  # fmt: skip
        table.add_column(heading, **options)
    for finding in report.findings:
        _add_finding(table, finding)
    for mode in set(_MODES) - {config.mode for config in wanted.configs}:
        sampling = "unfiltered" if mode == "support" else "filtered"
        table.add_row("", mode, Text("not needed", style="dim"), f"sampling is {sampling}; see --mode")
    for url, findings in report.engines.items():
        table.add_section()
        troubles = [finding for finding in findings if finding.verdict is not Verdict.OK]
        for finding in troubles:
            _add_finding(
                table, replace(finding, route="engine", check=f"{finding.route} {finding.check}", came=f"{url}: {finding.came}")
            )
        if not troubles:
            _add_finding(table, Finding("every check", "engine", Verdict.OK, f"{url}, asked directly"))
    console.print(table)
    console.print(Text(_summary(report)), soft_wrap=True)


def _add_finding(table: Table, finding: Finding) -> None:
    # Text, as what came may look like rich's markup
    told = Text(finding.came)
    if finding.remedy:
        told.append(f"\n→ {finding.remedy}", style="italic")
    table.add_row(finding.route, finding.check, Text(finding.verdict.value, style=_STYLES[finding.verdict]), told)


def _description(report: EndpointReport) -> str:
    engines = report.server.engines
    kind = "an engine" if engines is None else f"a router, {len(engines)} engine{'' if len(engines) == 1 else 's'} behind it"
    return f"{kind}; model {report.server.model or 'unknown'}, vocabulary {report.vocab_size or 'unknown'}"


def _summary(report: EndpointReport) -> str:
    if report.holds:
        return "Every check holds."
    verdicts = [finding.verdict for finding in report.everything]
    return f"{verdicts.count(Verdict.FAILED)} failed, {verdicts.count(Verdict.UNKNOWN)} could not be told."
