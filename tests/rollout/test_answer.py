"""What reading an answer costs in objects, and what it makes of the odd but valid ones."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from miles_sc.candidates import AGREEMENT
from miles_sc.rollout.answer import check_likeliest, meta_info_of, read_generated_tokens, sampling_versions
from miles_sc.rollout.answer_fields import top_candidates
from tests.rollout.count_objects import FEW, MANY, ROWS
from tests.samples import FORMS, VOCAB, K, answer, in_form, support_answer

TOKENS, TOP = "output_token_logprobs", "output_top_logprobs"


def read(meta, *, k=K, mode="selected", vocab_size=VOCAB):
    return read_generated_tokens(meta, k=k, mode=mode, vocab_size=vocab_size)


def test_base64_candidates_become_no_python_objects():
    # in a process of its own, where no other thread makes objects meanwhile
    counted = subprocess.run([sys.executable, "-m", "tests.rollout.count_objects"], capture_output=True, text=True, check=True)
    few, many, nested_few, nested_many = map(int, counted.stdout.split())
    assert abs(many - few) < FEW
    # the count does grow where every candidate is an object
    assert nested_many - nested_few > ROWS * (MANY - FEW)


@pytest.mark.parametrize("form", FORMS)
def test_arrays_have_their_types_whatever_the_form(form):
    generated = read(answer(form=form))
    assert (generated.token_ids.dtype, generated.log_probs.dtype) == (np.int64, np.float64)
    assert (generated.candidates.token_ids.dtype, generated.candidates.log_probs.dtype) == (np.int32, np.float32)
    assert len(generated) == 3 and generated.weight_versions == ["7"] * 3 and generated.finish_reason == "length"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", [None, " a", ""])
def test_text_beside_a_number_is_not_looked_at(form, text):
    meta = answer()
    for entry in [*meta[TOKENS], *(entry for row in meta[TOP] for entry in row)]:
        entry[2] = text
    generated, plain = read(in_form(meta, form)), read(answer())
    np.testing.assert_array_equal(generated.candidates.token_ids, plain.candidates.token_ids)
    np.testing.assert_array_equal(generated.candidates.log_probs, plain.candidates.log_probs)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_certain_token_may_be_written_as_a_whole_number(form):
    meta = answer(1)
    meta[TOP] = [[[0, 1, None], [-20, 0, None], [-30.0, 2, None], [-31.0, 3, None]]]
    meta[TOKENS] = [[0, 1, None]]
    generated = read(in_form(meta, form))
    assert generated.log_probs.tolist() == [0.0] and generated.token_ids.tolist() == [1]
    assert generated.candidates.log_probs[0].tolist() == [0.0, -20.0, -30.0, -31.0]


@pytest.mark.parametrize("difference, agrees", [(0.5 * AGREEMENT, True), (2 * AGREEMENT, False)])
@pytest.mark.parametrize("form", FORMS)
def test_a_sampled_token_agrees_with_its_candidate_to_rounding(form, difference, agrees):
    meta = answer(form=form)
    meta[TOKENS][2][0] -= difference
    if agrees:
        assert read(meta).log_probs[2] == meta[TOKENS][2][0]
    else:
        with pytest.raises(ValueError, match="row 2: the sampled token's log-prob differs by 0.0002"):
            read(meta)


@pytest.mark.parametrize("width", [1, K - 1, K])
def test_supports_of_one_width_fill_as_many_slots(width):
    generated = read(support_answer(5, width=width), mode="support")
    assert generated.support.lengths.tolist() == [width] * 5
    assert ((generated.candidates.token_ids >= 0).sum(axis=1) == width).all()
    assert generated.candidates.token_ids[:, :width].ravel().tolist() == generated.support.ids.tolist()
    assert np.isneginf(generated.candidates.log_probs[:, width:]).all()


def test_the_support_keeps_its_own_ids():
    """Arrays of a sample can be cut and joined apart: none is a view of another."""
    generated = read(support_answer(4, width=K), mode="support")
    assert not np.shares_memory(generated.candidates.token_ids, generated.support.ids)


SPANS = [
    ([(0, 3)], ["a"] * 3),
    ([(0, 1), (1, 3)], ["a", "b", "b"]),
    ([(0, 2), (1, 2)], None),
    ([(1, 4)], None),
    ([(0, 1), (2, 3)], None),
    ([(0, 4)], None),
    ([(0, 2)], None),
    ([(0, 4), (4, 3)], None),
]


@pytest.mark.parametrize("spans, versions", SPANS)
def test_every_token_has_one_weight_version(spans, versions):
    named = [{"version": name, "start": start, "end": end} for name, (start, end) in zip("ab", spans, strict=False)]
    meta = answer() | {"weight_versions": named}
    if versions:
        assert read(meta).weight_versions == versions
    else:
        with pytest.raises(ValueError, match="weight_versions = .* for 3 generated tokens: every token was sampled by one"):
            read(meta)


SPAN = {"version": "a", "start": 0, "end": 3}


@pytest.mark.parametrize(
    "spans", [5, ["a"], [1], [{"version": "a"}], [SPAN | {"end": "3"}], [SPAN | {"version": None}], [SPAN | {"start": True}]]
)
def test_what_is_no_list_of_spans_is_refused(spans):
    for reader in (read, sampling_versions):
        with pytest.raises(ValueError, match="weight_versions = .*: wanted"):
            reader(answer() | {"weight_versions": spans})


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({"weight_versions": [SPAN, {"version": "b", "start": 3, "end": 4}], "weight_version": "b"}, ["a", "b"]),
        ({"weight_versions": None, "weight_version": "b"}, ["b"]),
        ({"weight_version": None}, [""]),
        ({}, [""]),
    ],
)
def test_the_versions_that_sampled_an_answer(fields, versions):
    assert sampling_versions(fields) == versions


@pytest.mark.parametrize("body", [{}, {"error": "overloaded"}, {"meta_info": None}, {"meta_info": [1]}])
def test_an_answer_without_meta_info_is_quoted(body):
    with pytest.raises(ValueError, match="the answer holds no meta_info: .*is this the engine's /generate"):
        meta_info_of(body)


@pytest.mark.parametrize("options, message", [({"k": -1}, "k = -1: give a number"), ({"mode": "all"}, "mode = 'all': choose")])
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read(answer(), **options)


# --- an engine's candidates are the likeliest


@pytest.mark.parametrize("form", FORMS)
def test_an_engines_candidates_are_the_likeliest(form):
    check_likeliest(read(answer(6, form=form)))
    check_likeliest(read(answer(0)))
    check_likeliest(read_generated_tokens(answer(3), k=0))
    check_likeliest(read_generated_tokens(support_answer(5), k=K, mode="support"))


def test_shifted_rows_are_refused_though_no_sampled_token_meets_a_candidate():
    meta = answer(8)
    meta[TOP] = meta[TOP][1:] + meta[TOP][:1]
    # the check by itself, since among so few tokens a sampled one soon meets a candidate that disagrees
    generated = dataclasses.replace(read(answer(8)), candidates=top_candidates(meta, 8, K))
    with pytest.raises(
        ValueError, match=r"row \d: token \d+ has log-prob .* and is not among the candidates, the least of which"
    ):
        check_likeliest(generated)


def test_a_token_outside_is_at_most_as_likely_as_the_least_inside():
    meta = answer(1)
    least = meta["output_top_logprobs"][0][-1][0]
    outside = next(i for i in range(VOCAB) if i not in [entry[1] for entry in meta["output_top_logprobs"][0]])
    for log_prob, fits in ((least - 0.1, True), (least, True), (least + 0.01, False), (-0.01, False)):
        meta["output_token_logprobs"] = [[log_prob, outside, None]]
        if fits:
            check_likeliest(read(meta))
        else:
            with pytest.raises(ValueError, match=f"row 0: token {outside} has log-prob"):
                check_likeliest(read(meta))
