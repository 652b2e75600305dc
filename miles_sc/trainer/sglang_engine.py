"""SGLang servers for a run, as its flags ask for them."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines import Engine
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.rollout.engines.sglang.client import ClientSettings
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.probe import probe_native, raise_on_failure
from miles_sc.trainer.engines import MismatchedEngine


async def start_sglang_engine(
    args: argparse.Namespace,
    config: ScoreCenteringConfig,
    model: PreTrainedModel,
    *,
    prompt_ids: Sequence[int],
) -> Engine:
    """SGLang servers, launched or connected to, whose route has shown that it delivers what the run needs.

    Args:
        model: a copy of its own, on which ``--rollout-mismatch`` works before the servers get the weights.
        prompt_ids: what the route is tried with.

    Raises:
        ValueError: a server that does not start or a route that degrades; every finding and its remedy are named.
    """
    engine = await SglangEngine.start(
        sglang_settings(args), model_path=args.hf_checkpoint, config=config, log_dir=Path(args.output_dir) / "engine_logs"
    )
    try:
        if config.top_logprobs_num:
            raise_on_failure(await probe_native(engine.ask, config, vocab_size=model.config.vocab_size, prompt_ids=prompt_ids))
    except BaseException:
        await engine.close()
        raise
    mismatch = parse_mismatch(args.rollout_mismatch, seed=args.rollout_seed)
    return engine if args.rollout_mismatch == "none" else MismatchedEngine(engine, model, mismatch)


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
