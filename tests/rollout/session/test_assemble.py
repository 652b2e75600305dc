"""Recorded turns joined by token ids: every turn trained once, after what the engine saw."""

import itertools

import numpy as np
import pytest

from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample
from miles_sc.rollout.session.assemble import assemble_samples
from tests.rollout.session.chat_engine import EOS, encode
from tests.rollout.session.turns import turn
from tests.samples import state

MODES = [("selected", 6), ("support", 6), ("selected", 0)]


def context(*parts):
    """Ids of words and of the stop."""
    return [token for part in parts for token in ([EOS] if part is EOS else encode(part))]


@pytest.mark.parametrize(("mode", "k"), MODES)
def test_a_linear_history_is_its_turns_and_what_lies_between(mode, k):
    first = turn("u:", "x", mode=mode, k=k)
    second = turn(context("u:", "x", EOS, "v:"), "yz", 1, mode=mode, k=k, version="8")
    third = turn(context("u:", "x", EOS, "v:", "yz", "w"), "!", 2, mode=mode, k=k, version="8", finish="length")
    (sample,) = assemble_samples([first, second, third])

    expected = Sample(tokens=encode("u:"))
    append_generated_tokens(expected, first.generated)
    expected.append_observation(encode("v:"))
    append_generated_tokens(expected, second.generated)
    expected.strip_last_output_tokens(1)
    expected.append_observation(encode("w"))
    append_generated_tokens(expected, third.generated)
    expected.weight_versions = ["7", "7", "", "", "8", "8", "", "8"]
    expected.turns, expected.truncated = 3, True
    assert state(sample) == state(expected)
    sample.check_rows()


def test_nothing_recorded_gives_nothing():
    assert assemble_samples([]) == assemble_samples([], "branching") == []


@pytest.mark.parametrize(
    ("finish", "truncated", "aborted", "turns"),
    [("stop", False, False, 2), ("length", True, False, 2), ("abort", False, True, 1)],
)
def test_the_last_turn_tells_how_the_sample_ended(finish, truncated, aborted, turns):
    (sample,) = assemble_samples([turn("u", "x"), turn(context("u", "x", EOS, "v"), "y", 1, finish=finish)])
    assert (sample.truncated, sample.aborted, sample.turns) == (truncated, aborted, turns)


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_a_turn_cut_short_is_continued(finish):
    (sample,) = assemble_samples([turn("u", "x", finish=finish), turn(context("u", "x", "v"), "y", 1)])
    assert sample.loss_mask == [1, 0, 1, 1] and (sample.truncated, sample.aborted) == (False, False)


@pytest.mark.parametrize(("mode", "k"), MODES)
def test_a_turn_without_tokens_is_continued_by_its_own_repetition(mode, k):
    nothing = turn("u", "", finish="abort", mode=mode, k=k)
    (alone,) = assemble_samples([nothing])
    assert (alone.response_length, alone.loss_mask, alone.aborted, alone.turns) == (0, [], True, 0)
    (sample,) = assemble_samples([nothing, turn("u", "x", 1, mode=mode, k=k)])
    assert sample.tokens == context("u", "x", EOS) and sample.loss_mask == [1, 1] and sample.turns == 1


@pytest.mark.parametrize("words", ["", "x", "xy"])
@pytest.mark.parametrize("finish", ["stop", "abort"])
def test_a_prompt_asked_twice_is_a_branch(words, finish):
    once, again = turn("u", words, finish=finish), turn("u", "z", 1)
    if not len(once.generated):
        return  # nothing was generated: see above
    with pytest.raises(ValueError, match="turn 2 does not continue turn 1: at position 1.*asks the same prompt again"):
        assemble_samples([once, again])
    assert [sum(sample.loss_mask) for sample in assemble_samples([once, again], "branching")] == [len(once.generated), 2]


# --- what a template may leave out


@pytest.mark.parametrize(
    ("words", "finish", "left_out", "kept"),
    [
        ("xy", "stop", 1, 2),  # the stop
        ("xy\n\n", "stop", 3, 2),  # and the white space before it
        ("xy \n", "length", 2, 2),
        ("xy\n", "stop", 2, 2),
        ("xy\n", "stop", 1, 3),
        ("", "stop", 1, 0),
    ],
)
def test_the_stop_and_white_space_before_it_may_be_missing(words, finish, left_out, kept):
    earlier = turn("u", words, finish=finish)
    whole = earlier.token_ids.tolist()
    (sample,) = assemble_samples([earlier, turn(whole[: len(whole) - left_out] + encode("v"), "z", 1)])
    assert sample.loss_mask == [1] * kept + [0, 1, 1]
    assert sample.tokens == context("u", words[:kept], "v", "z", EOS)


@pytest.mark.parametrize(
    ("words", "finish", "left_out"), [("xy", "stop", 2), ("xy", "length", 1), ("xy", "abort", 1), ("xy\n", "stop", 3)]
)
def test_no_other_token_may_be_missing(words, finish, left_out):
    earlier = turn("u", words, finish=finish)
    whole = earlier.token_ids.tolist()
    with pytest.raises(ValueError, match="turn 2 does not continue turn 1"):
        assemble_samples([earlier, turn(whole[: len(whole) - left_out] + encode("v"), "z", 1)])


def test_an_answer_without_its_stop_may_be_continued_in_place():
    (sample,) = assemble_samples([turn("u", "x"), turn("ux", "y", 1)])
    assert sample.tokens == context("ux", "y", EOS) and sample.loss_mask == [1, 1, 1]


# --- errors of a linear history


@pytest.mark.parametrize(
    ("prompt", "position", "where", "had", "has", "why"),
    [
        ("u:xz..", 3, "answer", "y", "z", "tokenised anew"),
        ("w:xy..", 0, "prompt", "u", "w", "messages before it were changed"),
        ("u:x", 3, "answer", "y", None, "tokenised anew"),
        ("u", 1, "prompt", ":", None, "messages before it were changed"),
    ],
)
def test_a_turn_that_does_not_continue_is_named_with_the_place(prompt, position, where, had, has, why):
    came = f"token {encode(has)[0]}" if has else "nothing more"
    with pytest.raises(ValueError) as refused:
        assemble_samples([turn("u:", "xy"), turn(prompt, "z", 1)])
    message = str(refused.value)
    assert f"at position {position}, within that turn's {where}, it had token {encode(had)[0]} and" in message
    assert f"the prompt of turn 2 has {came}; " in message and why in message and '{"history": "branching"}' in message


def test_an_unknown_history_is_named():
    with pytest.raises(ValueError, match="history = 'tree': choose linear or branching"):
        assemble_samples([], "tree")


# --- branching


def test_a_second_continuation_starts_a_sample_of_its_own():
    root = turn("u", "x")
    left = turn(context("u", "x", EOS, "l"), "1", 1)
    right = turn(context("u", "x", EOS, "r"), "2", 2)
    deeper = turn(context("u", "x", EOS, "r", "2", EOS, "d"), "3", 3)
    first, second = assemble_samples([root, left, right, deeper], "branching")
    assert first.tokens == context("u", "x", EOS, "l", "1", EOS) and first.loss_mask == [1, 1, 0, 1, 1]
    assert second.tokens == deeper.token_ids.tolist() and second.loss_mask == [1, 1, 0, 1, 1]
    assert second.response_length == 5 and (first.turns, second.turns) == (2, 2)


def test_the_longest_match_is_continued():
    short, long = turn("u", "x"), turn(context("u", "x", EOS, "v"), "y", 1)
    other = turn("u", "x", 2)  # the same tokens as the first, once more
    later = turn(context("u", "x", EOS, "v", "y", EOS, "w"), "z", 3)
    samples = assemble_samples([short, long, other, later], "branching")
    assert [sample.turns for sample in samples] == [3, 1]


def test_of_equal_matches_the_latest_is_continued():
    samples = assemble_samples([turn("u", "x"), turn("u", "x", 1), turn(context("u", "x", EOS, "v"), "y", 2)], "branching")
    assert [sample.turns for sample in samples] == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_is_trained_exactly_once_whatever_the_tree(seed):
    """A random tree of turns; each Sample's trained rows are answers, after exactly the prompt that the engine saw."""
    rng = np.random.default_rng(seed)
    turns = [turn("u", "x")]
    for arrival in range(1, 12):
        parent = turns[rng.integers(len(turns))]
        drop = int(rng.integers(0, 2)) if parent.droppable else 0
        base = parent.token_ids.tolist()
        turns.append(
            turn(
                base[: len(base) - drop] + encode(str(rng.choice(list("pqr")))),
                str(rng.choice(["", "y", "zz"])),
                arrival,
                finish=str(rng.choice(["stop", "length"])),
            )
        )
    samples = assemble_samples(turns, "branching")
    assert sum(sample.turns for sample in samples) == len(turns)
    left = [(one.prompt_ids.tolist(), one.generated) for one in turns if len(one.generated)]
    for sample in samples:
        sample.check_rows()
        start = len(sample.tokens) - sample.response_length
        for trained, run in itertools.groupby(range(sample.response_length), key=sample.loss_mask.__getitem__):
            rows = list(run)
            if trained:
                _take(left, sample, start, rows)
    # nothing is missing but answers that were a stop alone, and were continued without it
    assert all(generated.token_ids.tolist() == [EOS] for _, generated in left)


def _take(left, sample, start, rows):
    """Removes the turns whose answer, less what was dropped, these rows are."""
    before, answered = sample.tokens[: start + rows[0]], sample.tokens[start + rows[0] : start + rows[-1] + 1]
    for place, (prompt, generated) in enumerate(left):
        ids = generated.token_ids.tolist()
        if prompt == before and answered in (ids, ids[:-1]):
            np.testing.assert_array_equal(
                sample.rollout_topk_log_probs[rows[0] : rows[-1] + 1], generated.candidates.log_probs[: len(rows)]
            )
            del left[place]
            return
    raise AssertionError(f"no turn answered {answered} after {before}")
