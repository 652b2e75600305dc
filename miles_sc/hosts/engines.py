"""A host's engines and nodes at start-up: what the engines are started with, whether they deliver, who has the plugin."""

import argparse
import asyncio
import importlib.metadata
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_sc.arguments import ORIGINAL_LOGPROB_VARIABLE
from miles_sc.hosts.run import bound, is_asked_for, producer_vocabulary, recording

logger = logging.getLogger(__name__)


def engine_environment(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Around what is added last to the engines' environment: log-probs keep the temperature, whoever wants otherwise."""
    environment = wrapped(*args, **kwargs)
    if recording(bound(wrapped, args, kwargs)["args"]) is None:
        return environment
    return {**environment, ORIGINAL_LOGPROB_VARIABLE: "0"}


# --- whether the engines deliver, asked through the very router that training will use


def engines_started(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``start_session_server(args)``, which the rollout manager calls once its engines and router are up."""
    result = wrapped(*args, **kwargs)
    examine_router(bound(wrapped, args, kwargs)["args"])
    return result


def examine_router(run: argparse.Namespace) -> None:
    """Where the run records.

    Raises:
        ValueError: a route that degrades; every finding and its remedy are named.
    """
    from miles_sc.rollout.engines.sglang.client import ClientSettings
    from miles_sc.rollout.probe import Examination, examine_endpoint, raise_on_failure

    config = recording(run)
    if config is None:
        return
    endpoint = f"http://{run.sglang_router_ip}:{run.sglang_router_port}"
    sessions = bool(getattr(run, "use_session_server", False))
    wanted = Examination(
        routes=("chat",) if sessions else ("native",),
        configs=[config],
        client=ClientSettings(request_timeout=120.0, attempts=2),
        vocab_size=producer_vocabulary(run),
    )
    with ThreadPoolExecutor(max_workers=1) as thread:  # the caller's may run a loop already
        report = thread.submit(asyncio.run, examine_endpoint(endpoint, wanted)).result()
    raise_on_failure(report.findings)
    logger.info("%s delivers %d candidates per token", endpoint, config.top_logprobs_num)


# --- whether every node has the plugin


def nodes_ready(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the driver's creation of the rollout manager, its first actor."""
    if is_asked_for(bound(wrapped, args, kwargs)["args"]):
        check_nodes(wrapped.__module__.split(".")[0])
    return wrapped(*args, **kwargs)


def check_nodes(package: str) -> None:
    """Asks a Ray worker on every node whether the plugin enters a host there.

    Raises:
        ValueError: the nodes where it would not, and what to do.
    """
    ours = importlib.metadata.version("miles-sc")
    broken = []
    for node, told in ask_nodes(package).items():
        if told["version"] is None:
            broken.append(f"node {node} has no miles_sc in {told['python']}")
        elif told["version"] != ours:
            broken.append(f"node {node} has miles_sc {told['version']}, and here it is {ours}")
        elif not told["watching"]:
            broken.append(f"on node {node} the start-up hook of miles_sc is off (MILES_SC_HOSTS, or site-packages was not read)")
        elif not told["entered"]:
            broken.append(f"on node {node} it does not enter {package}: {told['error']}")
    if broken:
        raise ValueError(
            f"{'; '.join(broken)}: workers there would train or sample without score centering. Install the same miles_sc on "
            "every node, in the environment that Ray's workers use; nothing was started"
        )


def ask_nodes(host: str) -> dict[str, dict[str, Any]]:
    """What a Ray worker says of itself, by ``host name (address)``; Ray must be connected.

    Args:
        host: is imported there, and whether the plugin has ``entered`` it, or else the ``error``, is told.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Nested, so that it is carried by value: a node without the package could not import it from here.
    def describe(host: str) -> dict[str, Any]:
        import importlib
        import importlib.metadata
        import sys

        try:
            version = importlib.metadata.version("miles-sc")
        except importlib.metadata.PackageNotFoundError:
            version = None
        startup = sys.modules.get("miles_sc.hosts.startup")
        told = {"version": version, "python": sys.executable, "watching": startup is not None and startup.is_watching()}
        try:
            importlib.import_module(host)
        except ImportError as error:
            return told | {"entered": False, "error": str(error)}
        activation = sys.modules.get("miles_sc.hosts.activation")
        active = activation and activation.activation(host)
        if not active:
            return told | {"entered": False, "error": "the package of that name is another one, or nothing watched"}
        return told | {"entered": not active.faults, "error": "; ".join(str(fault) for fault in active.faults)}

    ask = ray.remote(num_cpus=0)(describe)
    nodes = {
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": node["NodeID"] for node in ray.nodes() if node["Alive"]
    }
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(host)
        for node_id in nodes.values()
    ]
    return dict(zip(nodes, ray.get(asked, timeout=300), strict=True))
