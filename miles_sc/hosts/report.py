"""Whether the plugin enters an installed host: in this process, and in a Ray worker on every node."""

import importlib
import os

from rich.console import Console

from miles_sc import __version__
from miles_sc.hosts import startup
from miles_sc.hosts.activation import activation, known_host
from miles_sc.hosts.engines import ask_nodes


def print_host(package: str, console: Console) -> int:
    """Imports the host, as a launch would, and asks Ray.

    Returns:
        0 where the plugin enters it everywhere, else 1.
    """
    console.print(f"miles_sc {__version__}; its start-up hook is {'on' if startup.is_watching() else 'OFF'} in this process")
    if not startup.is_watching():
        said = os.environ.get(startup.SWITCH)
        remedy = (
            f"unset {startup.SWITCH} (= {said})" if said else "install the package with pip, which puts its hook in site-packages"
        )
        console.print(f"→ {remedy}")
        return 1
    try:
        importlib.import_module(package)
    except ImportError as error:
        console.print(f"{package} cannot be imported here: {error}\n→ run this in the environment of the launch")
        return 1
    active = activation(package)
    if active is None:
        console.print(f"the package {package} that is installed here is another one: it has no {known_host(package).entry}")
        return 1
    console.print(f"{package}: {active.version}")
    if active.own_loss:
        taken_over = "--score-centering-provider miles_sc takes it over" if active.seams else "the plugin stays out"
        console.print(f"it has a score_centering loss of its own, which trains; {taken_over}")
        if not active.seams:
            return 0
    faults = {fault.seam.name: fault for fault in active.faults}
    for seam in active.seams:
        console.print(f"  {seam.name}: {faults[seam.name].found if seam.name in faults else 'as it must be'}")
    entered = not faults
    console.print(f"{len(active.seams)} seams, {len(faults)} at fault: the plugin {'enters' if entered else 'stays out'} here")
    return 0 if entered and _nodes_are_ready(package, console) else 1


def _nodes_are_ready(package: str, console: Console) -> bool:
    import ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            console.print("no Ray cluster is running, so this machine alone is asked; start it (ray start) to ask every node")
            ray.init(log_to_driver=False)
    try:
        address, nodes = ray.get_runtime_context().gcs_address, ask_nodes(package)
    finally:
        if started:
            ray.shutdown()
    console.print(f"Ray cluster at {address}:")
    for node, told in nodes.items():
        state = "enters it there" if told["entered"] else f"does NOT enter it there: {told['error']}"
        console.print(f"  worker on {node}, {told['python']}: miles_sc {told['version'] or 'is not installed'}; {state}")
    return all(told["entered"] for told in nodes.values())
