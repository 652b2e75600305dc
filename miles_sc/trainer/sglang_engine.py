"""SGLang servers for a run, as its flags ask for them."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.probe import probe_native, raise_on_failure


async def start_sglang_engine(
    args: argparse.Namespace, config: ScoreCenteringConfig, *, vocab_size: int, prompt_ids: Sequence[int]
) -> SglangEngine:
    """SGLang servers, launched or connected to, each of which has shown that it delivers what the run needs.

    Args:
        prompt_ids: what they are tried with.

    Raises:
        ValueError: a server that does not start or a route that degrades; every finding and its remedy are named.
    """
    engine = await SglangEngine.start(
        sglang_settings(args), model_path=args.hf_checkpoint, config=config, log_dir=Path(args.output_dir) / "engine_logs"
    )
    try:
        await examine_routes(engine, config, vocab_size=vocab_size, prompt_ids=prompt_ids)
    except BaseException:
        await engine.close()
        raise
    return engine


async def examine_routes(
    engine: SglangEngine, config: ScoreCenteringConfig, *, vocab_size: int, prompt_ids: Sequence[int]
) -> None:
    """Asks for what the run needs in every way that its generations may go.

    Raises:
        ValueError: a route that degrades; its address, every finding and its remedy are named.
    """
    findings = []
    for address, ask in engine.routes.items():
        found = await probe_native(ask, config, vocab_size=vocab_size, prompt_ids=prompt_ids)
        findings += [replace(finding, route=f"{address} {finding.route}") for finding in found]
    raise_on_failure(findings)


def sglang_settings(args: argparse.Namespace) -> SglangSettings:
    """The engine's view of the flags."""
    router = args.sglang_router
    return SglangSettings(
        num_engines=args.rollout_num_engines,
        gpus_per_engine=args.rollout_num_gpus_per_engine,
        external_addresses=tuple(args.rollout_external_engine_addrs or ()),
        python=args.sglang_python or sys.executable,
        server_args=tuple(shlex.split(args.sglang_server_args)),
        use_router=router == "launch",
        router_url=None if router in ("none", "launch") else router,
        start_timeout=args.rollout_start_timeout,
        update_weights_by=args.update_weights_by,
        client=ClientSettings(request_timeout=args.rollout_request_timeout, max_connections=args.sglang_server_concurrency),
    )
