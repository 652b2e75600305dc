"""A real SGLang server behind the engine: its log-probs, what is refused, what is launched and ends."""

import asyncio
import os
import signal

import numpy as np
import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.generate import all_or_none, generate_response, greedy_responses
from miles_sc.rollout.sample import Sample
from tests.live import reference
from tests.live.conftest import slow_down
from tests.processes import MARK, after_a_while, in_sessions, marked, server_pids

TOLERANCE = 1e-4


def start(settings, model, config, folder):
    return SglangEngine.start(settings, model_path=model, config=config, log_dir=folder)


def samples(count):
    return [Sample(tokens=[40 + i, 50, 60], index=i) for i in range(count)]


async def respond(engine, settings, wanted):
    await all_or_none(generate_response(engine, sample, settings, sampling_seed=sample.index) for sample in wanted)


@pytest.mark.parametrize(
    "config",
    [ScoreCenteringConfig(top_logprobs_num=16, temperature=temperature) for temperature in (0.7, 1.0, 1.3)]
    + [ScoreCenteringConfig(top_logprobs_num=16, temperature=1.3, top_p=0.9, top_k=12)],
    ids=["T=0.7", "T=1.0", "T=1.3", "filtered"],
)
def test_log_probs_are_those_of_the_model_at_the_temperature(server, tmp_path, config):
    model, wanted = reference.load(server.model), samples(6)

    async def run():
        engine = await start(SglangSettings(external_addresses=(server.url,)), server.model, config, tmp_path)
        try:
            await respond(engine, reference.settings(config, model, tokens=12), wanted)
        finally:
            await engine.close()

    asyncio.run(run())
    for sample in wanted:
        assert 0 < sample.response_length <= 12
        assert reference.largest_error(sample, model, config.temperature) < TOLERANCE
        if config.mode == "selected":
            likeliest = np.sort(reference.log_probs(model, sample.tokens, config.temperature)[2:-1], axis=1)[:, :-17:-1]
            np.testing.assert_allclose(sample.rollout_topk_log_probs, likeliest, atol=TOLERANCE)


def test_more_candidates_than_the_vocabulary_are_refused_before_the_server_hears_of_them(server, tmp_path):
    vocabulary = reference.load(server.model).config.vocab_size
    found, refused = (ScoreCenteringConfig(top_logprobs_num=k) for k in (vocabulary, vocabulary + 1))
    settings = SglangSettings(external_addresses=(server.url,))

    async def run():
        with pytest.raises(ValueError, match=f"--rollout-top-logprobs-num {vocabulary + 1} exceeds the model's vocabulary"):
            await start(settings, server.model, refused, tmp_path)
        engine = await start(settings, server.model, found, tmp_path)
        try:
            return await greedy_responses(engine, [[40, 50]], max_new_tokens=1)
        finally:
            await engine.close()

    assert len(asyncio.run(run())[0]) == 1


def test_a_launched_server_that_is_killed_comes_back_with_the_newest_weights(sglang_python, model, tmp_path, monkeypatch):
    mark = str(tmp_path)
    monkeypatch.setenv(MARK, mark)
    config = ScoreCenteringConfig(top_logprobs_num=16)
    settings = SglangSettings(python=sglang_python, use_router=True, stop_timeout=1)
    new, wanted = reference.load(model, noise_seed=1), samples(4)

    async def run():
        engine = await start(settings, model, config, tmp_path)
        try:
            (killed,) = server_pids(mark)
            await engine.update_weights({name: value.numpy() for name, value in new.state_dict().items()}, "1")
            await slow_down(url_of(killed, mark), seconds=0.3)
            calls = asyncio.ensure_future(respond(engine, reference.settings(config, new, tokens=12), wanted))
            await asyncio.sleep(0.5)
            assert not calls.done()
            os.kill(killed, signal.SIGKILL)
            await calls
            (started,) = server_pids(mark)
            assert started != killed and len(in_sessions([started])) > 2
        finally:
            await engine.close()
            await engine.close()
        return killed, started

    sessions = asyncio.run(run())
    for sample in wanted:
        assert set(sample.weight_versions) == {"1"}
        assert reference.largest_error(sample, new, 1.0) < TOLERANCE
    assert after_a_while(lambda: in_sessions(sessions)) == [] and marked(mark) == {}


def url_of(pid, mark):
    arguments = marked(mark)[pid]
    return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
