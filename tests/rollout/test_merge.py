"""Turns that were recorded one by one become the conversation that recorded them all."""

import dataclasses

import numpy as np
import pytest

from miles_sc.rollout.merge import merge_turns
from miles_sc.rollout.response import append_candidates
from miles_sc.rollout.sample import Sample
from tests.samples import PROMPT, VOCAB, K, answer, state, support_answer

TOLD = [7, 8]


def conversation(*rows, mode="selected", told=TOLD):
    """The turns as samples of their own, and the sample that had them appended one by one."""
    make = support_answer if mode == "support" else answer
    whole, turns = Sample(tokens=list(PROMPT), weight_versions=[]), []
    for number, count in enumerate(rows):
        if number and told:
            whole.append_observation(told)
        turn = Sample(tokens=list(whole.tokens), turns=1, weight_versions=[str(number)] * count, reward=float(number))
        for sample in (turn, whole):
            append_candidates(sample, make(count, seed=number), k=K, mode=mode, vocab_size=VOCAB)
        whole.weight_versions = [*whole.weight_versions, *turn.weight_versions]
        turns.append(turn)
    return turns, dataclasses.replace(whole, turns=len(rows), reward=turns[-1].reward)


@pytest.mark.parametrize("mode", ["selected", "support"])
@pytest.mark.parametrize("rows", [(3,), (2, 3), (1, 0, 2)])
@pytest.mark.parametrize("told", [TOLD, []])
def test_merged_turns_are_the_conversation(mode, rows, told):
    turns, whole = conversation(*rows, mode=mode, told=told)
    before = [state(turn) for turn in turns]
    assert state(merge_turns(turns)) == state(whole)
    assert [state(turn) for turn in turns] == before


def test_merging_what_is_merged_is_merging_all():
    turns, whole = conversation(2, 1, 3)
    assert state(merge_turns([merge_turns(turns[:2]), turns[2]])) == state(whole)


def test_without_recording_the_sampled_tokens_are_merged():
    turns, whole = conversation(2, 1)
    for sample in (*turns, whole):
        sample.candidates = None
    assert state(merge_turns(turns)) == state(whole)


def test_a_turn_that_lost_its_last_token_to_the_template_is_stripped_first():
    turns, whole = conversation(3, 2)
    stop = turns[0].tokens[-1]
    at = len(PROMPT) + 2
    later = dataclasses.replace(turns[1], tokens=[*turns[1].tokens[:at], *turns[1].tokens[at + 1 :]])
    with pytest.raises(ValueError, match=f"at position {at} that one has token {stop} and the prompt of turn 2 has token 7"):
        merge_turns([turns[0], later])
    turns[0].strip_last_output_tokens(1)
    merged = merge_turns([turns[0], later])
    kept = [row for row in range(whole.response_length) if row != 2]
    np.testing.assert_array_equal(merged.rollout_topk_token_ids, whole.rollout_topk_token_ids[kept])
    assert merged.rollout_log_probs == [whole.rollout_log_probs[row] for row in kept]


def shorten(turn):
    turn.tokens = turn.tokens[: len(PROMPT)]
    turn.response_length, turn.loss_mask, turn.rollout_log_probs, turn.weight_versions = 0, [], [], []
    turn.candidates = turn.candidates.trim(len(turn.candidates))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda turn: turn.tokens.__setitem__(1, 9),
            "turn 2 does not continue turn 1: at position 1 that one has token 1 and .* 9",
        ),
        (shorten, "turn 2 does not continue turn 1: at position 3 .* has nothing more; keep them"),
        (lambda turn: setattr(turn, "candidates", None), "turn 2 lacks rollout_topk_token_ids and its neighbour has it"),
        (lambda turn: setattr(turn, "loss_mask", None), "turn 2 lacks loss_mask"),
        (lambda turn: setattr(turn, "weight_versions", None), "turn 2 lacks weight_versions"),
        (lambda turn: setattr(turn, "loss_mask", [1]), "loss_mask has 1 rows for a response of 2 tokens"),
    ],
)
def test_turns_that_do_not_fit_are_refused(change, message):
    turns, _ = conversation(2, 2)
    change(turns[1])
    with pytest.raises(ValueError, match=message):
        merge_turns(turns)


def test_a_support_on_one_side_alone_is_refused():
    turns, _ = conversation(2, 2, mode="support")
    turns[0].rollout_sampling_mask = None
    with pytest.raises(ValueError, match="turn 1 lacks rollout_sampling_mask and its neighbour has it"):
        merge_turns(turns)


def test_another_k_is_refused():
    turns, _ = conversation(2, 2)
    wider = Sample(tokens=list(turns[1].tokens[:-2]), weight_versions=["1"] * 2)
    append_candidates(wider, answer(2, seed=1, k=K + 1), k=K + 1, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=f"turn 2 has {K + 1} candidate slots and turn 1 {K}: record both with the same K"):
        merge_turns([turns[0], wider])


def test_nothing_to_merge_is_an_error():
    with pytest.raises(ValueError, match="no turns to merge"):
        merge_turns([])
