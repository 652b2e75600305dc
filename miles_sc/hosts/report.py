"""Whether the plugin enters an installed host: in this process, and in a Ray worker on every node."""

import importlib

from rich.console import Console
from rich.table import Table

from miles_sc import __version__
from miles_sc.hosts import startup
from miles_sc.hosts.activation import activation
from miles_sc.hosts.engines import ask_nodes


def print_host(package: str, console: Console) -> int:
    """Imports the host, as a launch would, and asks Ray.

    Returns:
        0 where the plugin enters it everywhere, else 1.
    """
    console.print(f"miles_sc {__version__}; its start-up hook is {'on' if startup.is_watching() else 'OFF'} in this process")
    if not startup.is_watching():
        console.print(f"→ install the package into site-packages (pip install miles-sc), and unset {startup.SWITCH}")
        return 1
    try:
        importlib.import_module(package)
    except ImportError as error:
        console.print(f"{package} cannot be imported here: {error}\n→ run this in the environment of the launch")
        return 1
    active = activation(package)
    if active is None:
        console.print(f"the package {package} that is installed here is another one: it has no {package}.utils.arguments")
        return 1
    console.print(f"{package}: {active.version}", soft_wrap=True)
    if active.own_loss:
        console.print("it has a score_centering loss of its own, which trains; --score-centering-provider miles_sc takes it over")
    faults = {fault.seam.name: fault for fault in active.faults}
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("seam", "here"):
        table.add_column(heading, overflow="fold")
    for seam in active.seams:
        table.add_row(seam.name, str(faults[seam.name].found) if seam.name in faults else "as it must be")
    console.print(table)
    entered = not faults
    console.print(f"{len(active.seams)} seams, {len(faults)} at fault: the plugin {'enters' if entered else 'stays out'} here")
    return 0 if entered and _nodes_are_ready(package, console) else 1


def _nodes_are_ready(package: str, console: Console) -> bool:
    import ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:  # no cluster is running: a worker of this machine is asked
            ray.init(log_to_driver=False)
    try:
        nodes = ask_nodes(package, enter=True)
    finally:
        if started:
            ray.shutdown()
    for node, told in nodes.items():
        state = "enters it there" if told["entered"] else f"does NOT enter it there {told.get('error', '')}"
        console.print(f"Ray worker on {node}: miles_sc {told['version'] or 'is not installed'}; {state}", soft_wrap=True)
    return all(told["entered"] for told in nodes.values())
