"""Every way to spoil an answer, in each form: nothing is appended, and the error names the field, the row and the value."""

import copy

import numpy as np
import pytest

from miles_sc.rollout import append_candidates
from miles_sc.rollout.answer import read_generated_tokens
from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample
from tests.samples import FORMS, PROMPT, VOCAB, K, answer, in_form, sample_with, state, support_answer

NAN = float("nan")
TOKENS, TOP = "output_token_logprobs", "output_top_logprobs"
MASK, LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
VALUES, IDS = "output_top_logprobs_val_flat", "output_top_logprobs_idx_flat"
SHAPE = "output_top_logprobs_shape"
MINUS_INFINITIES = [np.finfo(np.float32).min.item(), -65504.0]


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
    *((spoiled(TOKENS, 1, 0, value), f"{TOKENS}, row 1: {value} in place of a number") for value in (True, False)),
    *((spoiled(TOKENS, 1, 1, value), f"{TOKENS}, row 1: {value} in place of a whole number") for value in (True, False)),
    (spoiled(TOKENS, 2, 1, 2**70), f"{TOKENS}, row 2: {2**70} in place of a whole number"),
    (spoiled(TOKENS, 1, 0, -(10**400)), f"{TOKENS}, row 1: -10+ in place of a number"),
    *((spoiled(TOKENS, value=value), f"{TOKENS} = .*: wanted a list with one row per") for value in (5, "x", {"0": [-1.0, 2]})),
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
    (spoiled(TOP, 1, (2, 1), 2**40), f"{TOP} holds an id beyond int32, {2**40} in row 1: these are not token ids"),
    *((spoiled(TOP, 1, (2, 0), value), f"{TOP}, row 1: {value} in place of a number") for value in (True, False)),
    *((spoiled(TOP, 1, (2, 1), value), f"{TOP}, row 1: {value} in place of a whole number") for value in (True, False)),
    (spoiled(TOP, 1, (2, 1), 5.0), f"{TOP}, row 1: 5.0 in place of a whole number"),
    (spoiled(TOP, 1, 2, "-5"), f"{TOP}, row 1: '-' in place of a number"),
    (spoiled(TOP, 1, 2, {"logprob": -5.0, "id": 3}), rf"{TOP}, row 1: {{.*}} in place of \[log-prob, id, text\]"),
    *((spoiled(TOP, 1, value=value), f"{TOP}, row 1: 0 candidates came") for value in ("abcd", dict.fromkeys("abcd"))),
    *((spoiled(TOP, value=value), f"{TOP} = .*: wanted a list with one row per") for value in (5, "abc", {"0": []})),
]


def in_any_form(change):
    """A mutation per form: the candidates ``[row][slot]`` of the nested answer are changed, and sent in the form."""

    def of(form):
        def mutate(meta):
            nested = answer()
            change(nested[TOP])
            meta.update(in_form(nested, form))

        return mutate

    return of


def in_slot(row, slot, number, value):
    """Another log-prob (number 0) or id (number 1)."""
    return in_any_form(lambda top: top[row][slot].__setitem__(number, value))


def same_id(slot, other):
    return in_any_form(lambda top: top[1][slot].__setitem__(1, top[1][other][1]))


def same_candidate(slot, other):
    return in_any_form(lambda top: top[1].__setitem__(slot, top[1][other]))


CANDIDATES = [  # mostly at a row whose sampled token is outside the head; all forms must say the same
    *((in_slot(1, 2, 0, value), "row 1, slot 2: log-prob -.*stands for -inf") for value in MINUS_INFINITIES),
    (in_slot(1, 2, 0, NAN), "candidates, row 1, slot 2: log-prob nan: .*finite"),
    (in_slot(1, 2, 0, -np.inf), "candidates, row 1, slot 2: log-prob -inf: .*finite"),
    (in_slot(1, 2, 0, 0.25), "candidates, row 1, slot 2: log-prob 0.25 is above 0"),
    (in_slot(1, 2, 0, -1e-4), r"candidates, row 1: the candidates' mass 1\.\d+ exceeds 1"),
    *((same_id(*slots), "candidates, row 1: an id stands twice: .*merged by token text") for slots in ((2, 0), (3, 2), (0, 3))),
    *((same_candidate(*slots), "candidates, row 1: an id stands twice") for slots in ((1, 0), (3, 1))),
    (in_slot(1, 2, 1, VOCAB), f"candidates, row 1, slot 2: id {VOCAB} is outside the vocabulary of {VOCAB}"),
    (in_slot(1, 2, 1, -7), "candidates, row 1, slot 2: id -7"),
    (in_slot(1, 2, 1, -1), "candidates, row 1, slot 2: log-prob .* in an unused slot"),
    (in_slot(0, 0, 0, -4.0), "candidates, row 0: the sampled token's log-prob differs by .*temperatures"),
    (in_any_form(lambda top: top.append(top.pop(0))), "candidates, row 0: the sampled token's log-prob differs by"),
]

FLAT = [
    (spoiled(SHAPE, value=[2, K]), rf"{SHAPE} has 2 rows for 3 generated tokens"),
    (spoiled(SHAPE, value=[3, K - 1]), rf"{SHAPE} = \[3, {K - 1}\]: {K - 1} candidates came and {K} .*route"),
    (spoiled(SHAPE, value=[3]), rf"{SHAPE} = \[3\]: wanted \[tokens, candidates\]"),
    (spoiled(SHAPE, value="3x4"), f"{SHAPE} = '3x4': wanted"),
    (spoiled(SHAPE, value=[3.0, K]), rf"{SHAPE} = \[3.0, {K}\]: wanted"),
    (spoiled(SHAPE, value=[True, K]), rf"{SHAPE} = \[True, {K}\]: wanted"),
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
    (spoiled(VALUES, 6, value=[-1.0]), rf"{VALUES}, row 1: \[-1.0\] in place of a number"),
    *((spoiled(VALUES, 6, value=value), f"{VALUES}, row 1: {value} in place of a number") for value in (True, False)),
    *((spoiled(IDS, 6, value=value), f"{IDS}, row 1: {value} in place of a whole number") for value in (True, False)),
    *(
        (spoiled(name, value=value), f"{name} = {value!r}: wanted a list")
        for name in (VALUES, IDS)
        for value in (5, "x", {"0": 1})
    ),
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


def support_overflow(meta):
    meta[MASK][1], meta[LOG_PROBS][1] = list(range(K + 1)), [float(-np.log(K + 1))] * (K + 1)


def empty_support_row(meta):
    meta[MASK][1], meta[LOG_PROBS][1] = [], []


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
    (spoiled(MASK, 1, 0, 2**33), f"{MASK} holds an id beyond int32, {2**33} in row 1"),
    *((spoiled(MASK, 1, 0, value), f"{MASK}, row 1: {value} in place of a whole number") for value in (True, False)),
    *((spoiled(LOG_PROBS, 2, 1, value), f"{LOG_PROBS}, row 2: {value} in place of a number") for value in (True, False)),
    (spoiled(MASK, 1, value="ab"), f"{MASK}, row 1: 'ab' in place of a list of ids"),
    (spoiled(LOG_PROBS, 1, value={"0": -1.0, "1": -1.0}), f"{LOG_PROBS}, row 1: its log-probs do not match the 2 ids"),
    *((spoiled(name, value=value), f"{name} = {value!r}: wanted") for name in (MASK, LOG_PROBS) for value in (5, "abc")),
    (spoiled(MASK, 2, 1, VOCAB), f"row 2, slot 1: id {VOCAB} is outside the vocabulary of {VOCAB}"),
    (spoiled(MASK, 2, value=lambda ids: [ids[0], ids[0], ids[2]]), "row 2: an id stands twice"),
    (spoiled(MASK, 2, value=lambda ids: [ids[1], ids[0], ids[1]]), f"{MASK}, row 2: .* stands 0 times in the support"),
    (spoiled(MASK, 2, value=lambda ids: [ids[0], ids[2], ids[0]]), "row 2: an id stands twice"),
    (spoiled(MASK, 0, 0, lambda token: (token + 1) % VOCAB), f"{MASK}, row 0: .* stands 0 times .*shifted"),
    (spoiled(MASK, 1, value=lambda ids: [ids[1], ids[1]]), f"{MASK}, row 1: .* stands 2 times in the support"),
    (spoiled(LOG_PROBS, 2, 0, NAN), "row 2, slot 0: log-prob nan"),
    (spoiled(LOG_PROBS, 2, 0, MINUS_INFINITIES[0]), "row 2, slot 0: log-prob -3.4.*stands for -inf"),
    (spoiled(LOG_PROBS, 0, 0, 0.01), f"{TOKENS}, row 0: log-prob 0.0.* of token .* is above 0"),
    (spoiled(LOG_PROBS, 0, 0, -0.01), r"candidates, row 0: the support's mass 0\.99\d+ is not 1: .*normalised"),
    (spoiled(LOG_PROBS, 1, value=lambda values: [v + 0.01 for v in values]), r"row 1: .* mass 1\.01\d+ exceeds 1"),
    (support_overflow, f"{MASK}, row 1: .* exceeds the arrays, 5 ids for 4 slots; raise .* to at least 5"),
    (empty_support_row, "row 1 of the sampling support is empty"),
]


SPOILED = [
    *((form, *case) for form in FORMS for case in SAMPLED + SAMPLED_LOG_PROBS),
    *(("nested", *case) for case in NESTED),
    *((form, of(form), message) for form in FORMS for of, message in CANDIDATES),
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


@pytest.mark.parametrize(("mutate", "message"), [case for case in SAMPLED + SAMPLED_LOG_PROBS if "differs" not in case[1]])
def test_without_recording_the_sampled_tokens_are_checked_too(mutate, message):
    meta, sample = answer(), Sample(tokens=list(PROMPT))
    append_generated_tokens(sample, read_generated_tokens(answer(seed=1), k=0, vocab_size=VOCAB))
    before = state(sample)
    mutate(meta)
    with pytest.raises(ValueError, match=message):
        append_generated_tokens(sample, read_generated_tokens(meta, k=0, vocab_size=VOCAB))
    assert state(sample) == before
