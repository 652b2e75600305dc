"""What a run asks of its servers before it begins: each of them, whichever way its generations may go."""

import argparse
import asyncio

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.trainer import sglang_engine
from miles_sc.trainer.arguments import add_train_arguments
from tests.rollout import bad_routes as bad
from tests.rollout.tiny_model import TRUE_VOCAB

FLAGS = "--hf-checkpoint m --num-rollout 1 --rollout-batch-size 1 --task chain_sum --rollout-engine sglang"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """``start(layers)``: an engine with one server behind each layer; ``start.closed`` says whether it was given back."""
    honest = bad.HonestEngine()

    class Engine:
        closed = False

        def __init__(self, layers):
            self.routes = {f"http://server-{number}": bad.asking(honest, layer) for number, layer in enumerate(layers)}

        async def close(self):
            start.closed = True

    def start(*layers):
        async def started(settings, **_):
            return Engine(layers)

        monkeypatch.setattr(sglang_engine.SglangEngine, "start", started)
        parser = argparse.ArgumentParser()
        add_train_arguments(parser)
        args = parser.parse_args([*FLAGS.split(), "--output-dir", str(tmp_path)])
        config = ScoreCenteringConfig(top_logprobs_num=16, temperature=0.7)
        return asyncio.run(sglang_engine.start_sglang_engine(args, config, vocab_size=TRUE_VOCAB, prompt_ids=bad.PROMPT))

    start.closed = False
    return start


def test_honest_servers_and_a_router_that_drops_the_flat_form_may_train(start):
    assert list(start(bad.drops_flat, None, None).routes) == [f"http://server-{number}" for number in range(3)]
    assert not start.closed


def test_one_server_that_drops_the_temperature_ends_the_run_and_is_named(start):
    with pytest.raises(ValueError, match=r"- http://server-1 native, temperature: .*SGLANG_RETURN_ORIGINAL_LOGPROB=0") as refused:
        start(None, bad.asking_for(temperature=1.0), None)
    assert "server-0" not in str(refused.value) and "server-2" not in str(refused.value)
    assert start.closed
