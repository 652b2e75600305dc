"""An OpenAI-compatible server between agents and an engine: it records the sampler's distribution of every turn and hands out
Samples.

Importing this package loads no web framework; `decode_samples` reads what ``POST /sessions/{id}/samples`` answers.
"""

from miles_sc.rollout.session.wire import decode_samples, encode_samples

__all__ = ["decode_samples", "encode_samples"]
