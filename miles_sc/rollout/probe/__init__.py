"""What a route to an engine delivers, asked of it with the requests that training sends (CONTRACT 5 and 6)."""

from miles_sc.rollout.probe.finding import Finding, Verdict, raise_on_failure
from miles_sc.rollout.probe.route import Ask, probe_chat, probe_native
from miles_sc.rollout.probe.server import Server, ask_server

__all__ = ["Ask", "Finding", "Server", "Verdict", "ask_server", "probe_chat", "probe_native", "raise_on_failure"]
