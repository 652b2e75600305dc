"""The rollout side: what is asked of an engine, what is read from it, and the Sample that carries it."""

from miles_sc.rollout.request import configure_request
from miles_sc.rollout.response import append_candidates
from miles_sc.rollout.sample import Sample

__all__ = ["Sample", "append_candidates", "configure_request"]
