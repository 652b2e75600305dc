"""Several turns: the environment's answers become untrained rows, and every turn keeps its own."""

import asyncio

import numpy as np
import pytest

from miles_sc.rollout.generate import generate_conversation
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_generate import CONFIGS, decode, finished, fresh, settings
from tests.samples import PROMPT, K, answer, sample_with, state, support_answer

TOLD = [7, 8]


class Script:
    """Says the same after each turn, for so many turns."""

    def __init__(self, times, tokens=TOLD):
        self.times, self.tokens, self.heard = times, tokens, []

    async def observe(self, sample, text):
        self.heard.append(text)
        return self.tokens if len(self.heard) <= self.times else None


def converse(engine, sample, environment, *, mode="selected", max_response_len=20, max_turns=5):
    asyncio.run(
        generate_conversation(engine, sample, settings(mode, max_response_len), environment, max_turns=max_turns, sampling_seed=3)
    )
    return sample


@pytest.mark.parametrize("mode", CONFIGS)
def test_turns_and_observations_stand_in_order(mode):
    make = support_answer if mode == "support" else answer
    metas = [finished(make(rows, seed=rows), "stop") for rows in (2, 1, 3)]
    environment, engine = Script(times=2), ScriptedEngine(*metas)
    sample = converse(engine, fresh(1)[0], environment, mode=mode)

    spoken = [[entry[1] for entry in meta["output_token_logprobs"]] for meta in metas]
    expected = [*PROMPT, 0, *spoken[0], *TOLD, *spoken[1], *TOLD, *spoken[2]]
    assert sample.tokens == expected and sample.response_length == 10
    assert sample.loss_mask == [1, 1, 0, 0, 1, 0, 0, 1, 1, 1] and sample.turns == 3
    assert sample.weight_versions == ["7", "7", "", "", "7", "", "", "7", "7", "7"]
    assert environment.heard == [decode(tokens) for tokens in spoken]
    assert [request["input_ids"] for request in engine.requests] == [expected[:4], expected[:8], expected[:11]]
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [20, 16, 13]
    if mode == "off":
        return
    alone = [sample_with(meta, mode=mode) for meta in metas]
    trained = np.asarray(sample.loss_mask, bool)
    for field in ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_log_probs"):
        ours = np.asarray(getattr(sample, field))
        np.testing.assert_array_equal(ours[trained], np.concatenate([getattr(one, field) for one in alone]))
    assert (sample.rollout_topk_token_ids[~trained] == -1).all() and sample.rollout_topk_token_ids.shape == (10, K)
    assert np.isneginf(sample.rollout_topk_log_probs[~trained]).all()
    if mode == "support":
        support = sample.rollout_sampling_mask
        assert [support.ids[support.offsets[row]] for row in (2, 3)] == TOLD and (support.lengths[[2, 3, 5, 6]] == 1).all()


def test_every_turn_draws_from_a_stream_of_its_own():
    engine = ScriptedEngine(*[finished(answer(1), "stop")] * 3)
    converse(engine, fresh(1)[0], Script(times=2))
    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert seeds[0] == 3 and len(set(seeds)) == 3 and max(seeds) < 2**63


def test_it_ends_after_the_last_allowed_turn_without_another_observation():
    environment = Script(times=9)
    sample = converse(ScriptedEngine(*[finished(answer(1), "stop")] * 2), fresh(1)[0], environment, max_turns=2)
    assert sample.turns == 2 and sample.loss_mask == [1, 0, 0, 1] and len(environment.heard) == 1


def test_a_turn_cut_by_its_length_ends_it():
    environment = Script(times=9)
    sample = converse(ScriptedEngine(finished(answer(3), "length")), fresh(1)[0], environment, max_response_len=3)
    assert sample.truncated and environment.heard == []


@pytest.mark.parametrize(("room", "told"), [(6, True), (5, False), (4, False)])
def test_an_observation_that_leaves_no_room_is_not_cut_but_left_out(room, told):
    engine = ScriptedEngine(finished(answer(3), "stop"), finished(answer(1), "stop"))
    sample = converse(engine, fresh(1)[0], Script(times=1), max_response_len=room)
    assert sample.response_length == (6 if told else 3) and sample.truncated is not told


def test_an_aborted_turn_is_finished_before_the_environment_answers():
    metas = finished(answer(1, seed=1), "stop"), finished(answer(2, seed=2), "abort"), finished(answer(1, seed=3), "stop")
    whole, engine = Script(times=1), ScriptedEngine(*metas)
    sample = converse(engine, fresh(1)[0], whole)
    assert sample.aborted and sample.turns == 1 and len(whole.heard) == 1
    converse(engine, sample, whole)
    second = [entry[1] for meta in metas[1:] for entry in meta["output_token_logprobs"]]
    assert sample.turns == 2 and not sample.aborted and sample.loss_mask == [1, 0, 0, 1, 1, 1]
    assert whole.heard[1] == decode(second)


def test_an_observation_without_tokens_is_refused():
    with pytest.raises(ValueError, match="sample 10: an observation without tokens; answer None"):
        converse(ScriptedEngine(finished(answer(1), "stop")), fresh(1)[0], Script(times=1, tokens=[]))


def test_a_bad_second_answer_leaves_the_first_turn_as_it_was():
    engine = ScriptedEngine(finished(answer(2), "stop"), answer(2) | {"output_top_logprobs": None})
    sample = fresh(1)[0]
    with pytest.raises(ValueError, match="sample 10: output_top_logprobs is missing"):
        converse(engine, sample, Script(times=1))
    expected = sample_with(answer(2))
    expected.append_observation(TOLD)
    assert state(sample)["rollout_topk_log_probs"] == state(expected)["rollout_topk_log_probs"]
    assert sample.loss_mask == [1, 1, 0, 0] and sample.turns == 1
