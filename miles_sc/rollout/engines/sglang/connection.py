"""One server as the engine sees it: what it says about itself, and what of that cannot be trained with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import EngineClient
from miles_sc.rollout.engines.sglang.server import ServerProcess
from miles_sc.rollout.engines.sglang.settings import SglangSettings

_TRUE = ("true", "1", "yes", "y")


@dataclass(eq=False)
class Server:
    """A healthy server.

    Attributes:
        generations: calls that are repeated when they fail.
        control: calls that the server must hear once.
        tensor_ranks: over how many ranks it splits every layer.
        process: of a launched server.
        in_flight: generations under way.
    """

    generations: EngineClient
    control: EngineClient
    tensor_ranks: int
    process: ServerProcess | None
    in_flight: int = 0

    @property
    def address(self) -> str:
        return self.control.url

    async def weight_version(self) -> str:
        """The name of the weights that it holds."""
        return (await self.generations.get("/model_info"))["weight_version"]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one generation."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Ends the connections, not the server."""
        await self.generations.close()
        await self.control.close()


async def connect(
    address: str, settings: SglangSettings, config: ScoreCenteringConfig, process: ServerProcess | None = None
) -> Server:
    """Connects to a healthy server.

    Raises:
        ValueError: it cannot be reached, or runs in a way that cannot be trained with.
    """
    generations = EngineClient(address, settings.client)
    control = EngineClient(address, dataclasses.replace(settings.client, attempts=1))
    try:
        facts = await generations.get("/server_info")
        _check(address, facts, settings, config)
    except BaseException:
        await generations.close()
        await control.close()
        raise
    return Server(generations, control, facts.get("tp_size") or 1, process)


def _check(address: str, facts: Mapping[str, Any], settings: SglangSettings, config: ScoreCenteringConfig) -> None:
    def refuse(found: str, remedy: str) -> None:
        raise ValueError(f"SGLang server {address} {found}; {remedy}")

    if algorithm := facts.get("speculative_algorithm"):
        refuse(f"decodes speculatively ({algorithm})", "start it without --speculative-algorithm")
    # reported only by a server with SGLANG_EXPOSE_OWN_ENV_VARS
    for state in facts.get("internal_states") or ():
        original = (state.get("env_vars") or {}).get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
        if original.lower() in _TRUE:
            refuse(
                f"reports log-probs from before the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB = {original})",
                "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=0",
            )
    if facts.get("allow_auto_truncate"):
        refuse("cuts long prompts in silence (allow_auto_truncate)", "start it without --allow-auto-truncate")
    longest = facts.get("sampling_mask_max_tokens")
    if config.mode == "support" and longest is not None and longest < config.top_k:
        refuse(
            f"reports supports of at most {longest} tokens and --rollout-top-k is {config.top_k}",
            f"start it with --sampling-mask-max-tokens {config.top_logprobs_num}, or lower --rollout-top-k",
        )
    replicas, stages = facts.get("dp_size") or 1, facts.get("pp_size") or 1
    if settings.update_weights_by != "disk" and (replicas > 1 or stages > 1):
        refuse(
            f"has {replicas} replicas and {stages} pipeline stages, which take new weights from disk only",
            "set update_weights_by to disk, or start servers of one replica and one stage",
        )
