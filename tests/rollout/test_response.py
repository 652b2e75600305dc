"""What is read from an answer: recorded ones of real servers, every form of a known one, every way to spoil it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from miles_sc.rollout import append_candidates
from miles_sc.rollout.answer import read_generated_tokens
from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample
from tests.samples import (
    FORMS,
    PROMPT,
    VOCAB,
    K,
    answer,
    in_form,
    log_distributions,
    sample_with,
    state,
    support_answer,
)

NAN = float("nan")


# --- every form of a known answer


@pytest.mark.parametrize("form", FORMS)
def test_values_land_where_they_belong(form):
    sample = sample_with(answer(form=form))
    log_q = log_distributions(3)
    order = np.argsort(-log_q, axis=1)
    np.testing.assert_array_equal(sample.rollout_topk_token_ids, order[:, :K])
    np.testing.assert_array_equal(sample.rollout_topk_log_probs, np.take_along_axis(log_q, order[:, :K], axis=1))
    assert sample.tokens == [*PROMPT, order[0, 0], order[1, K + 1], order[2, 0]]
    assert sample.rollout_log_probs == pytest.approx(log_q[np.arange(3), sample.tokens[3:]].tolist())
    assert (sample.rollout_topk_token_ids.dtype, sample.rollout_topk_log_probs.dtype) == (np.int32, np.float32)


def test_support_values_land_where_they_belong():
    meta = support_answer(4)
    sample = sample_with(meta, mode="support")
    for row, (ids, values) in enumerate(
        zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
    ):
        assert sample.rollout_topk_token_ids[row].tolist() == ids + [-1] * (K - len(ids))
        assert sample.rollout_topk_log_probs[row].tolist() == pytest.approx(values + [-np.inf] * (K - len(values)))
        assert sample.rollout_log_probs[row] == pytest.approx(values[ids.index(sample.tokens[3 + row])])
    assert sample.rollout_sampling_mask.lengths.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("form", FORMS)
def test_calls_append_below_each_other(form):
    first, second = answer(2, seed=1), answer(3, seed=2, form=form)
    both, apart = sample_with(first, second), sample_with(second)
    assert both.response_length == 5 and both.loss_mask == [1] * 5
    assert both.tokens[-3:] == apart.tokens[-3:] and both.rollout_log_probs[-3:] == apart.rollout_log_probs
    np.testing.assert_array_equal(both.rollout_topk_token_ids[2:], apart.rollout_topk_token_ids)
    np.testing.assert_array_equal(both.rollout_topk_log_probs[2:], apart.rollout_topk_log_probs)


def test_support_calls_append_below_each_other():
    both = sample_with(support_answer(2, seed=1), support_answer(3, seed=2), mode="support")
    assert both.rollout_sampling_mask.lengths.tolist() == [1, 2, 1, 2, 3]
    assert both.rollout_sampling_mask.padded(K).tolist() == both.rollout_topk_token_ids.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_vocabulary_below_k_fills_fewer_slots(form):
    sample = Sample(tokens=list(PROMPT))
    full = answer(2) | {TOP: [[[-9.0, i, None] for i in range(VOCAB)]] * 2, TOKENS: [[-9.0, 1, None]] * 2}
    append_candidates(sample, in_form(full, form), k=VOCAB + 2, vocab_size=VOCAB)
    assert sample.rollout_topk_token_ids.tolist() == [[*range(VOCAB), -1, -1]] * 2
    assert np.isneginf(sample.rollout_topk_log_probs[:, VOCAB:]).all()
    with pytest.raises(ValueError, match=f"{VOCAB} candidates came and {VOCAB + 2} were asked for"):
        append_candidates(Sample(tokens=list(PROMPT)), in_form(full, form), k=VOCAB + 2)


@pytest.mark.parametrize("mode", ["selected", "support"])
@pytest.mark.parametrize("fields", [{}, {"output_token_logprobs": []}, {"output_token_logprobs": None}])
def test_no_token_needs_no_field(mode, fields):
    sample = sample_with(answer(2) if mode == "selected" else support_answer(2), mode=mode)
    before = state(sample)
    append_candidates(sample, {"completion_tokens": 0, **fields}, k=K, mode=mode, vocab_size=VOCAB)
    assert state(sample) == before


def test_the_hosts_sample_needs_only_the_named_fields():
    names = (
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "rollout_topk_token_ids",
        "rollout_topk_log_probs",
        "rollout_sampling_mask",
    )
    ours = Sample(tokens=list(PROMPT))
    theirs = SimpleNamespace(**{name: getattr(ours, name) for name in names})
    for sample in (ours, theirs):
        append_candidates(sample, support_answer(), k=K, mode="support", vocab_size=VOCAB)
    assert set(vars(theirs)) == set(names) and theirs.response_length == 3
    assert state(Sample(**vars(theirs))) == state(ours)


def test_the_samples_own_lists_are_not_written_to():
    sample = sample_with(answer(2))
    tokens, log_probs, mask, ids = (
        sample.tokens,
        sample.rollout_log_probs,
        sample.loss_mask,
        sample.rollout_topk_token_ids,
    )
    lengths = [len(value) for value in (tokens, log_probs, mask, ids)]
    append_candidates(sample, answer(2, seed=5), k=K, vocab_size=VOCAB)
    assert [len(value) for value in (tokens, log_probs, mask, ids)] == lengths


# --- every way to spoil it: nothing is appended and the error names field, row and value or remedy


def spoiled(field, row=None, place=None, value=None, *, drop=False):
    """A mutation: replaces what stands at ``meta[field][row][place]...`` by ``value``, or deletes it."""
    path = [
        field,
        *([] if row is None else [row]),
        *(place if isinstance(place, tuple) else [] if place is None else [place]),
    ]

    def mutate(meta):
        at = meta
        for step in path[:-1]:
            at = at[step]
        if drop:
            del at[path[-1]]
        else:
            at[path[-1]] = value(at[path[-1]]) if callable(value) else value

    return mutate


TOKENS, TOP = "output_token_logprobs", "output_top_logprobs"
MASK, LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
VALUES, IDS = "output_top_logprobs_val_flat", "output_top_logprobs_idx_flat"
SHAPE = "output_top_logprobs_shape"
MINUS_INFINITIES = [np.finfo(np.float32).min.item(), -65504.0]

SAMPLED = [  # what every form shares
    (spoiled(TOKENS, drop=True), f"{TOKENS} is missing from meta_info: ask with return_logprob"),
    (spoiled(TOKENS, 2, drop=True), f"{TOKENS} has 2 rows for 3 generated tokens: every token needs exactly one"),
    (spoiled(TOKENS, value=lambda rows: rows + rows[:1]), f"{TOKENS} has 4 rows for 3 generated tokens"),
    (spoiled(TOKENS, value=[]), f"{TOKENS} has 0 rows for 3 generated tokens"),
    (spoiled(TOKENS, 1, value=None), rf"{TOKENS}, row 1: None in place of \[log-prob, id, text\]"),
    (spoiled(TOKENS, 1, value=[-1.0]), rf"{TOKENS}, row 1: \[-1.0\] in place of"),
    (spoiled(TOKENS, 1, 1, None), f"{TOKENS}, row 1: None in place of a whole number"),
    (spoiled(TOKENS, 1, 1, 2.5), f"{TOKENS}, row 1: 2.5 in place of a whole number"),
    (spoiled(TOKENS, 1, 1, "7"), f"{TOKENS}, row 1: '7' in place of a whole number"),
    (spoiled(TOKENS, 1, 0, None), f"{TOKENS}, row 1: None in place of a number"),
    (spoiled(TOKENS, 1, 0, "-1.5"), f"{TOKENS}, row 1: '-1.5' in place of a number"),
    (spoiled(TOKENS, 2, 0, [-1.5]), rf"{TOKENS}, row 2: \[-1.5\] in place of a number"),
]

# under filtered sampling the log-prob is the support's, and the unfiltered one is not used
SAMPLED_LOG_PROBS = [
    *((spoiled(TOKENS, 1, 0, value), f"{TOKENS}, row 1: log-prob -.* stands for -inf") for value in MINUS_INFINITIES),
    (spoiled(TOKENS, 1, 0, NAN), f"{TOKENS}, row 1: log-prob nan of token .* is not finite"),
    (spoiled(TOKENS, 1, 0, -np.inf), f"{TOKENS}, row 1: log-prob -inf of token .* is not finite"),
    (spoiled(TOKENS, 1, 0, 0.5), f"{TOKENS}, row 1: log-prob 0.5 of token .* is above 0"),
    (spoiled(TOKENS, 1, 1, VOCAB), f"{TOKENS}, row 1: token {VOCAB} is outside the vocabulary of {VOCAB}"),
    (spoiled(TOKENS, 1, 1, -3), f"{TOKENS}, row 1: token -3 is outside the vocabulary"),
    # rows shifted by one: the neighbour's log-prob stands at a token of the head
    (spoiled(TOKENS, 0, 0, lambda value: value - 0.01), "row 0: the sampled token's log-prob differs by 0.01"),
]

NESTED = [
    (spoiled(TOP, drop=True), f"{TOP} is missing: {K} candidates were asked for and none came; .*route"),
    (spoiled(TOP, value=None), f"{TOP} is missing"),
    (spoiled(TOP, 2, drop=True), f"{TOP} has 2 rows for 3 generated tokens: .*none is cut or padded"),
    (spoiled(TOP, value=lambda rows: rows + rows[:1]), f"{TOP} has 4 rows for 3 generated tokens"),
    (spoiled(TOP, value=lambda rows: rows[1:] + rows[:1]), "candidates, row 0: the sampled token's log-prob differs"),
    (spoiled(TOP, 1, value=None), f"{TOP}, row 1: 0 candidates came and {K} were asked for"),
    (spoiled(TOP, 1, value=5), f"{TOP}, row 1: 0 candidates came"),
    (spoiled(TOP, 1, 3, drop=True), f"{TOP}, row 1: 3 candidates came and {K} were asked for; .*20 on chat.*update"),
    (spoiled(TOP, 1, value=lambda row: row + [[-30.0, 0, None]]), f"{TOP}, row 1: {K + 1} candidates came and {K}"),
    (spoiled(TOP, 1, 2, None), rf"{TOP}, row 1: None in place of \[log-prob, id, text\]"),
    (spoiled(TOP, 1, 2, [-1.0]), rf"{TOP}, row 1: \[-1.0\] in place of"),
    (spoiled(TOP, 1, (2, 0), None), f"{TOP}, row 1: None in place of a number"),
    (spoiled(TOP, 1, (2, 0), "NaN"), f"{TOP}, row 1: 'NaN' in place of a number"),
    (spoiled(TOP, 1, (2, 0), [1.0]), rf"{TOP}, row 1: \[1.0\] in place of a number"),
    (spoiled(TOP, 1, (2, 1), None), f"{TOP}, row 1: None in place of a whole number"),
    (spoiled(TOP, 1, (2, 1), "5"), f"{TOP}, row 1: '5' in place of a whole number"),
    (spoiled(TOP, 1, (2, 1), 2**40), f"{TOP} holds an id beyond int32"),
]


def in_slot(row, slot, number):
    """The same mutation of a candidate's log-prob (number 0) or id (number 1) in every form."""

    def of(form, value):
        def mutate(meta):
            nested = copy.deepcopy(answer())
            entry = nested[TOP][row][slot]
            entry[number] = value(nested[TOP][row]) if callable(value) else value
            meta.update(in_form(nested, form))

        return mutate

    return of


def same_as_first(number):
    return lambda entries: entries[0][number]


CANDIDATES = [  # at a row whose sampled token is outside the head; all forms must say the same
    *((in_slot(1, 2, 0), value, "row 1, slot 2: log-prob -.*stands for -inf") for value in MINUS_INFINITIES),
    (in_slot(1, 2, 0), NAN, "candidates, row 1, slot 2: log-prob nan: .*finite"),
    (in_slot(1, 2, 0), -np.inf, "candidates, row 1, slot 2: log-prob -inf: .*finite"),
    (in_slot(1, 2, 0), 0.25, "candidates, row 1, slot 2: log-prob 0.25 is above 0"),
    (in_slot(1, 2, 0), -1e-4, r"candidates, row 1: the candidates' mass 1\.\d+ exceeds 1"),
    (in_slot(1, 2, 1), same_as_first(1), "candidates, row 1: an id stands twice: .*merged by token text"),
    (in_slot(1, 2, 1), VOCAB, f"candidates, row 1, slot 2: id {VOCAB} is outside the vocabulary of {VOCAB}"),
    (in_slot(1, 2, 1), -7, "candidates, row 1, slot 2: id -7"),
    (in_slot(1, 2, 1), -1, "candidates, row 1, slot 2: log-prob .* in an unused slot"),
    (in_slot(0, 0, 0), -4.0, "candidates, row 0: the sampled token's log-prob differs by .*temperatures"),
]

FLAT = [
    (spoiled(SHAPE, value=[2, K]), rf"{SHAPE} has 2 rows for 3 generated tokens"),
    (spoiled(SHAPE, value=[3, K - 1]), rf"{SHAPE} = \[3, {K - 1}\]: {K - 1} candidates came and {K} .*route"),
    (spoiled(SHAPE, value=[3]), rf"{SHAPE} = \[3\]: wanted \[tokens, candidates\]"),
    (spoiled(SHAPE, value="3x4"), f"{SHAPE} = '3x4': wanted"),
    (spoiled(SHAPE, value=[3, -K]), rf"{SHAPE} = \[3, -{K}\]: wanted"),
    (spoiled("output_top_logprobs_null_prefix", value=1), "null_prefix = 1: a generated token without candidates"),
]

FLAT_LISTS = [
    (spoiled(VALUES, drop=True), f"neither {VALUES} nor {VALUES}_b64 came with .*; .*route"),
    (spoiled(IDS, value=None), f"neither {IDS} nor {IDS}_b64 came"),
    (spoiled(VALUES, 11, drop=True), rf"{VALUES} holds 11 numbers and {SHAPE} says \[3, 4\]: was it truncated"),
    (spoiled(IDS, value=lambda ids: ids + [0]), f"{IDS} holds 13 numbers"),
    (spoiled(VALUES, 6, value=None), f"{VALUES}, row 1: None in place of a number"),
    (spoiled(VALUES, 6, value="x"), f"{VALUES}, row 1: 'x' in place of a number"),
    (spoiled(IDS, 9, value=1.5), f"{IDS}, row 2: 1.5 in place of a whole number"),
    (spoiled(IDS, 9, value=-(2**40)), f"{IDS} holds an id beyond int32"),
]

B64 = [
    (spoiled(f"{VALUES}_b64", drop=True), f"neither {VALUES} nor {VALUES}_b64 came"),
    (spoiled(f"{VALUES}_b64", value=lambda text: text[:-3]), f"{VALUES}_b64 is not base64 .*truncated"),
    (spoiled(f"{VALUES}_b64", value=lambda text: text[:-4]), f"{VALUES}_b64 holds 45 bytes, no whole number"),
    (spoiled(f"{IDS}_b64", value=lambda text: text[:-16]), rf"{IDS} holds 9 numbers and {SHAPE} says \[3, 4\]"),
    (spoiled(f"{IDS}_b64", value="?!"), f"{IDS}_b64 is not base64"),
    (spoiled(f"{IDS}_b64", value=[1, 2]), f"{IDS}_b64 is not base64"),
    (spoiled(f"{VALUES}_b64_dtype", value="float16"), f"{VALUES}_b64_dtype = 'float16': only float32 is read"),
    (spoiled(f"{IDS}_b64_dtype", value="int64"), f"{IDS}_b64_dtype = 'int64': only int32 is read"),
    (spoiled(SHAPE, value=[3, K, 1]), rf"{SHAPE} = \[3, {K}, 1\]: wanted"),
]

SUPPORT = [
    (spoiled(MASK, drop=True), f"{MASK} is missing from an answer to filtered sampling; .*route"),
    (spoiled(LOG_PROBS, drop=True), f"{LOG_PROBS} is missing from an answer to filtered sampling"),
    (spoiled(MASK, 2, drop=True), f"{MASK} has 2 rows for 3 generated tokens"),
    (spoiled(LOG_PROBS, value=lambda rows: rows + [[0.0]]), f"{LOG_PROBS} has 4 rows for 3 generated tokens"),
    (spoiled(MASK, 1, value=None), f"{MASK}, row 1: None in place of a list of ids"),
    (spoiled(MASK, 1, value=[]), f"{LOG_PROBS}, row 1: its log-probs do not match the 0 ids of {MASK}"),
    (spoiled(LOG_PROBS, 1, value=-0.5), f"{LOG_PROBS}, row 1: its log-probs do not match the 2 ids .*support mode"),
    (spoiled(LOG_PROBS, 2, 0, drop=True), f"{LOG_PROBS}, row 2: its log-probs do not match the 3 ids"),
    (spoiled(LOG_PROBS, 2, 1, None), f"{LOG_PROBS}, row 2: None in place of a number"),
    (spoiled(LOG_PROBS, 1, 0, "x"), f"{LOG_PROBS}, row 1: 'x' in place of a number"),
    (spoiled(MASK, 2, 2, None), f"{MASK}, row 2: None in place of a whole number"),
    (spoiled(MASK, 1, 0, 2**33), f"{MASK} holds an id beyond int32"),
    (spoiled(MASK, 2, 1, VOCAB), f"row 2, slot 1: id {VOCAB} is outside the vocabulary of {VOCAB}"),
    (spoiled(MASK, 2, value=lambda ids: [ids[0], ids[0], ids[2]]), "row 2: an id stands twice"),
    (spoiled(MASK, 0, 0, lambda token: (token + 1) % VOCAB), f"{MASK}, row 0: .* stands 0 times .*shifted"),
    (spoiled(MASK, 1, value=lambda ids: [ids[1], ids[1]]), f"{MASK}, row 1: .* stands 2 times in the support"),
    (spoiled(LOG_PROBS, 2, 0, NAN), "row 2, slot 0: log-prob nan"),
    (spoiled(LOG_PROBS, 2, 0, MINUS_INFINITIES[0]), "row 2, slot 0: log-prob -3.4.*stands for -inf"),
    (spoiled(LOG_PROBS, 0, 0, 0.01), f"{TOKENS}, row 0: log-prob 0.0.* of token .* is above 0"),
    (spoiled(LOG_PROBS, 0, 0, -0.01), r"candidates, row 0: the support's mass 0\.99\d+ is not 1: .*normalised"),
    (spoiled(LOG_PROBS, 1, value=lambda values: [v + 0.01 for v in values]), r"row 1: .* mass 1\.01\d+ exceeds 1"),
]


def support_overflow(meta):
    meta[MASK][1], meta[LOG_PROBS][1] = list(range(K + 1)), [float(-np.log(K + 1))] * (K + 1)


def empty_support_row(meta):
    meta[MASK][1], meta[LOG_PROBS][1] = [], []


SUPPORT += [
    (support_overflow, f"{MASK}, row 1: .* exceeds the arrays, 5 ids for 4 slots; raise .* to at least 5"),
    (empty_support_row, "row 1 of the sampling support is empty"),
]

SPOILED = [
    *((form, *case) for form in FORMS for case in SAMPLED + SAMPLED_LOG_PROBS),
    *(("nested", *case) for case in NESTED),
    *((form, at(form, value), message) for form in FORMS for at, value, message in CANDIDATES),
    *((form, *case) for form in ("flat", "b64") for case in FLAT),
    *(("flat", *case) for case in FLAT_LISTS),
    *(("b64", *case) for case in B64),
    *(("support", *case) for case in SAMPLED + SUPPORT),
]


@pytest.mark.parametrize(("form", "mutate", "message"), SPOILED)
def test_a_spoiled_answer_changes_nothing_and_is_named(form, mutate, message):
    mode = "support" if form == "support" else "selected"
    meta = support_answer() if form == "support" else answer(form=form)
    sample = sample_with(copy.deepcopy(meta), mode=mode)
    mutate(meta)
    before, arrays = state(sample), (sample.rollout_topk_token_ids, sample.rollout_topk_log_probs)
    with pytest.raises(ValueError, match=message):
        append_candidates(sample, meta, k=K, mode=mode, vocab_size=VOCAB)
    assert state(sample) == before
    assert (sample.rollout_topk_token_ids is arrays[0]) and (sample.rollout_topk_log_probs is arrays[1])


@pytest.mark.parametrize("form", [*FORMS, "support"])
def test_the_unspoiled_answer_passes(form):
    """What the mutations start from is whole, so that each of them fails for its own reason."""
    mode = "support" if form == "support" else "selected"
    meta = support_answer() if form == "support" else answer(form=form)
    assert sample_with(meta, copy.deepcopy(meta), mode=mode).response_length == 6


# --- what the sample itself must be


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"rollout_topk_token_ids": None}, "token_ids are NoneType"),
        (
            {"rollout_log_probs": [-1.0]},
            "rollout_log_probs has 1 entries for a response of 3 tokens: the sample is misaligned",
        ),
        ({"rollout_log_probs": None}, "rollout_log_probs has 0 entries for a response of 3"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 entries for a response of 3"),
        ({"response_length": 2}, r"candidates \(3, 4\) for 2 response tokens and k = 4"),
        ({"rollout_topk_token_ids": None, "rollout_topk_log_probs": None}, "3 response tokens without candidates"),
    ],
)
def test_a_misaligned_sample_is_not_extended(spoil, message):
    sample = sample_with(answer())
    for name, value in spoil.items():
        setattr(sample, name, value)
    before = state(sample)
    with pytest.raises(ValueError, match=message):
        append_candidates(sample, answer(seed=1), k=K, vocab_size=VOCAB)
    assert state(sample) == before


def test_one_run_has_one_kind_of_sampling_and_one_k():
    cases = [
        (sample_with(answer()), support_answer(), "support", K, "earlier tokens lack their sampling support"),
        (
            sample_with(support_answer(), mode="support"),
            answer(),
            "selected",
            K,
            "holds a .*support and this call was unfiltered",
        ),
        (sample_with(answer()), answer(k=K + 1), "selected", K + 1, r"\(3, 4\) for 3 response tokens and k = 5"),
    ]
    for sample, meta, mode, k, message in cases:
        before = state(sample)
        with pytest.raises(ValueError, match=message):
            append_candidates(sample, meta, k=k, mode=mode, vocab_size=VOCAB)
        assert state(sample) == before


def test_a_missing_loss_mask_means_that_all_are_trained():
    sample = sample_with(answer())
    sample.loss_mask = None
    append_candidates(sample, answer(seed=1), k=K, vocab_size=VOCAB)
    assert sample.loss_mask == [1] * 6


@pytest.mark.parametrize(
    "options, message", [({"k": -1}, "k = -1: give a number"), ({"mode": "all"}, "mode = 'all': choose")]
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read_generated_tokens(answer(), **{"k": K, "mode": "selected", "vocab_size": VOCAB, **options})


# --- recording off


@pytest.mark.parametrize(("mutate", "message"), [case for case in SAMPLED + SAMPLED_LOG_PROBS if "differs" not in case[1]])
def test_without_recording_the_sampled_tokens_are_checked_too(mutate, message):
    meta, sample = answer(), Sample(tokens=list(PROMPT))
    append_generated_tokens(sample, read_generated_tokens(answer(seed=1), k=0, vocab_size=VOCAB))
    before = state(sample)
    mutate(meta)
    with pytest.raises(ValueError, match=message):
        append_generated_tokens(sample, read_generated_tokens(meta, k=0, vocab_size=VOCAB))
    assert state(sample) == before
