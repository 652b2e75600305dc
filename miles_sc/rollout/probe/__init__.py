"""What a route to an engine delivers, asked of it with the requests that training sends (CONTRACT 5 and 6)."""

from miles_sc.rollout.probe.endpoint import EndpointReport, Examination, examine_endpoint, small_prompt
from miles_sc.rollout.probe.finding import Finding, Verdict, raise_on_failure
from miles_sc.rollout.probe.route import probe_chat, probe_native

__all__ = [
    "EndpointReport", "Examination", "Finding", "Verdict", "examine_endpoint", "probe_chat", "probe_native",
    "raise_on_failure", "small_prompt",
]  # fmt: skip
