"""Recorded turns over the scripted engine's distribution, without an engine."""

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.session.record import read_turn
from tests.rollout.session.chat_engine import VOCAB, ChatEngine, encode

K = 6


def config(mode="selected", k=K):
    return ScoreCenteringConfig(top_logprobs_num=k, top_k=5 if mode == "support" else -1)


def answer(prompt, words, *, mode="selected", k=K, finish="stop", version="7"):
    """A chat completion that generated ``words`` after the ids, or the words, of ``prompt``."""
    engine = ChatEngine()
    engine.words, engine.finish, engine.version = [words], finish, version
    asked = {"input_ids": encode(prompt) if isinstance(prompt, str) else list(prompt), "messages": [], "logprobs": True}
    asked |= {"return_meta_info": True, "return_prompt_token_ids": True}
    asked |= {"return_sampling_mask": True, "top_k": 5} if mode == "support" else {"top_logprobs": k}
    return engine.answer(asked)


def turn(prompt, words, arrival=0, *, mode="selected", k=K, **kwargs):
    return read_turn(answer(prompt, words, mode=mode, k=k, **kwargs), config(mode, k), vocab_size=VOCAB, arrival=arrival)
