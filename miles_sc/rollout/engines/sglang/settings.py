"""What a user decides about the SGLang servers of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings

HOST = "127.0.0.1"
WeightPath = Literal["disk", "distributed", "tensor"]

# what lets SGLang run on a CPU, with torch's own kernels; a user's flags and environment win
CPU_SERVER_ARGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
    "--disable-cuda-graph", "--skip-server-warmup", "--mem-fraction-static", "0.1", "--max-total-tokens", "4096",
    "--sleep-on-idle",
)  # fmt: skip
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}

# log-probs of the distribution that was sampled, at its temperature: what the loss is about
_SAMPLED_LOG_PROBS = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
_CHEAP_HEALTH_CHECK = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
_OWNED_FLAGS = ("--host", "--port", "--model-path")
_SAMPLING_MASK_DEFAULT = 4096


@dataclass(frozen=True)
class SglangSettings:
    """How the servers of a run are had, reached and given new weights.

    Attributes:
        num_engines: servers to launch on this machine.
        gpus_per_engine: GPUs of a launched server, over which it splits every layer; the servers take the machine's in turn.
        external_addresses: servers that already run, ``host:port``; none is launched then, and none is stopped.
        python: the interpreter that has SGLang.
        server_args: flags for the launched servers; they win over ours, except for host, port and model path.
        environment: variables for the launched servers, besides those of this process.
        use_router: launch SGLang's router before the servers; its package must be there for this process's interpreter.
        router_url: a router that already runs and knows the servers. With any router, control calls still go to each server.
        start_timeout: seconds until a launched process must be healthy.
        stop_timeout: seconds that a process is given to end by itself before it is killed.
        update_weights_by: ``disk``, a checkpoint in the log directory, which every server must be able to read; ``distributed``,
            a broadcast (NCCL where there is CUDA, else gloo); ``tensor``, shared memory of this machine.
        client: how patient calls are.
    """

    num_engines: int = 1
    gpus_per_engine: int = 1
    external_addresses: tuple[str, ...] = ()
    python: str = sys.executable
    server_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    use_router: bool = False
    router_url: str | None = None
    start_timeout: float = 600.0
    stop_timeout: float = 20.0
    update_weights_by: WeightPath = "disk"
    client: ClientSettings = ClientSettings()

    def __post_init__(self) -> None:
        for name in ("num_engines", "gpus_per_engine"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give 1 or more")
        if self.update_weights_by not in get_args(WeightPath):
            raise ValueError(f"update_weights_by = {self.update_weights_by!r}: choose one of {', '.join(get_args(WeightPath))}")
        for name in ("start_timeout", "stop_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: give a number of seconds above 0")
        if self.use_router and self.router_url:
            raise ValueError(f"use_router launches a router and router_url = {self.router_url!r} names one: choose")
        if self.external_addresses and (self.server_args or self.environment):
            raise ValueError("server_args and environment are for launched servers; with external_addresses none is launched")
        if len(set(self.external_addresses)) != len(self.external_addresses):
            raise ValueError(f"external_addresses = {self.external_addresses}: one of them is there twice")
        _refuse_owned_flags("server_args", self.server_args, _OWNED_FLAGS)


def server_command(
    settings: SglangSettings, config: ScoreCenteringConfig, model_path: Path, *, port: int, index: int
) -> list[str]:
    """The command line of launched server ``index``."""
    gpus = settings.gpus_per_engine
    on_gpus = ("--tp-size", str(gpus), "--base-gpu-id", str(index * gpus))
    defaults = on_gpus if torch.cuda.is_available() else CPU_SERVER_ARGS
    if config.mode == "support" and config.top_logprobs_num > _SAMPLING_MASK_DEFAULT:
        defaults = (*defaults, "--sampling-mask-max-tokens", str(config.top_logprobs_num))
    owned = ("--model-path", str(model_path), "--host", HOST, "--port", str(port))
    return [settings.python, "-m", "sglang.launch_server", *owned, *defaults, *settings.server_args]


def server_environment(settings: SglangSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launched server; nothing overrides whose log-probs are reported."""
    defaults = _CHEAP_HEALTH_CHECK if torch.cuda.is_available() else _CHEAP_HEALTH_CHECK | CPU_ENVIRONMENT
    return {**defaults, **inherited, **settings.environment, **_SAMPLED_LOG_PROBS}


def _refuse_owned_flags(setting: str, arguments: Sequence[str], owned: Sequence[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0]
        # argparse also takes a flag's beginning
        if flag.startswith("--") and len(flag) > 3 and any(name.startswith(flag) for name in owned):
            raise ValueError(f"{setting} holds {argument}: miles_sc chooses {', '.join(owned)} itself; leave it out")
