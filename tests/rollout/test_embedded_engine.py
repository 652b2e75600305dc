"""The embedded engine: its wire, its distribution, its random streams and its batching."""

import json

import numpy as np
import pytest
import torch

pybase64 = pytest.importorskip("pybase64")
pytest.importorskip("transformers")

from miles_sc.rollout.engines.sampling import inverse_cdf, ordered_top  # noqa: E402
from tests.rollout.tiny_model import (  # noqa: E402
    AS_B64,
    AS_FLAT,
    AS_SUPPORT,
    STOP,
    TRUE_VOCAB,
    body,
    build_engine,
    build_model,
)

META = [
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
]
LOGPROB = ["input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"]
NESTED = ["input_top_logprobs", "output_top_logprobs"]
FLAT_SHAPE = ["output_top_logprobs_shape", "output_top_logprobs_null_prefix"]
FLAT = ["input_top_logprobs", "output_top_logprobs_val_flat", "output_top_logprobs_idx_flat", *FLAT_SHAPE]
FLAT_B64 = [
    "input_top_logprobs",
    "output_top_logprobs_val_flat_b64",
    "output_top_logprobs_idx_flat_b64",
    "output_top_logprobs_val_flat_b64_dtype",
    "output_top_logprobs_idx_flat_b64_dtype",
    *FLAT_SHAPE,
]
SUPPORT = ["output_token_sampling_mask", "output_token_sampling_logprobs", "output_token_sampling_mask_length"]


@pytest.fixture(scope="module")
def model():
    return build_model()


@pytest.fixture
def engine(model):
    return build_engine(model)


def reference_log_probs(model, prompt, output_ids, temperature):
    """float64 ``[n, true vocabulary]`` from one forward without cache or padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *output_ids]])).logits[0, len(prompt) - 1 : -1, :TRUE_VOCAB]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def head_arrays(meta, count):
    """(ids ``[n, K]``, log-probs ``[n, K]``) of any of the three forms."""
    if "output_top_logprobs" in meta:
        rows = [list(zip(*row, strict=True)) for row in meta["output_top_logprobs"]]
        assert all(text is None for row in rows for text in row[2])
        return np.array([row[1] for row in rows], np.int32), np.array([row[0] for row in rows], np.float32)
    assert meta["output_top_logprobs_null_prefix"] == 0
    shape = meta["output_top_logprobs_shape"]
    if "output_top_logprobs_val_flat" in meta:
        ids, values = meta["output_top_logprobs_idx_flat"], meta["output_top_logprobs_val_flat"]
        return np.array(ids, np.int32).reshape(shape), np.array(values, np.float32).reshape(shape)
    ids = np.frombuffer(
        pybase64.b64decode(meta["output_top_logprobs_idx_flat_b64"]), meta["output_top_logprobs_idx_flat_b64_dtype"]
    )
    values = np.frombuffer(
        pybase64.b64decode(meta["output_top_logprobs_val_flat_b64"]), meta["output_top_logprobs_val_flat_b64_dtype"]
    )
    return ids.reshape(shape), values.reshape(shape)


def token_log_probs(answer):
    return np.array([row[0] for row in answer["meta_info"]["output_token_logprobs"]])


@pytest.mark.parametrize(
    ("request_body", "extra"),
    [
        (body(), LOGPROB),
        (body(top=8), LOGPROB + NESTED),
        (body(top=8, **AS_FLAT), LOGPROB + FLAT),
        (body(top=8, **AS_B64), LOGPROB + FLAT_B64),
        (body(params={"top_k": 8, "top_p": 0.9}, **AS_SUPPORT), LOGPROB + SUPPORT),
        ({"input_ids": [5, 6, 7]}, []),
    ],
    ids=["greedy-evaluation", "nested", "flat", "base64", "support", "bare"],
)
def test_fields_are_the_servers_in_its_order(engine, request_body, extra):
    (answer,) = engine.generate([request_body])
    assert list(answer) == ["text", "output_ids", "meta_info"]
    assert list(answer["meta_info"]) == [*META[:5], *extra, *META[5:]]
    meta = json.loads(json.dumps(answer))["meta_info"]
    count = len(answer["output_ids"])
    assert meta["completion_tokens"] == count and meta["prompt_tokens"] == 3
    assert meta["finish_reason"] in ({"type": "length", "length": count}, {"type": "stop", "matched": STOP})
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    if extra:
        assert [row[1:] for row in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
        assert meta["output_token_logprobs_length"] == count == 6


def test_nested_flat_and_base64_hold_the_same(engine):
    seeded = {"sampling_seed": 11}
    answers = engine.generate([body(top=9, params=seeded, **form) for form in ({}, AS_FLAT, AS_B64)])
    assert answers[0]["output_ids"] == answers[1]["output_ids"] == answers[2]["output_ids"]
    heads = [head_arrays(answer["meta_info"], 6) for answer in answers]
    for ids, values in heads:
        assert ids.shape == (6, 9) and ids.dtype == np.int32 and values.dtype == np.float32
        np.testing.assert_array_equal(ids, heads[0][0])
        np.testing.assert_array_equal(values, heads[0][1])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_equal_an_unpadded_forward(engine, model, temperature):
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17], [5, 6, 7]]
    params = {"temperature": temperature}
    answers = engine.generate([body(prompt, top=20, params=params, **AS_B64) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_log_probs(model, prompt, answer["output_ids"], temperature).numpy()
        ids, values = head_arrays(answer["meta_info"], 6)
        sampled = np.take_along_axis(expected, np.array(answer["output_ids"])[:, None], 1)[:, 0]
        np.testing.assert_allclose(token_log_probs(answer), sampled, atol=1e-5)
        np.testing.assert_allclose(values, np.take_along_axis(expected, ids.astype(int), 1), atol=1e-5)
        np.testing.assert_allclose(values, -np.sort(-expected, axis=1)[:, :20], atol=1e-5)


def test_padded_vocabulary_is_never_reported_or_drawn(model):
    answers = build_engine(model, vocab_size=8, stop_token_ids=[]).generate([body(top=8)] * 64)
    for answer in answers:
        ids, values = head_arrays(answer["meta_info"], 6)
        assert max(answer["output_ids"]) < 8 and ids.max() < 8
        np.testing.assert_allclose(np.exp(values.astype(float)).sum(1), 1.0, atol=1e-6)


def filtered(log_probs, top_k, top_p):
    """Independent reading of top-k, then top-p: ids in order and their renormalised log-probs."""
    order = sorted(range(len(log_probs)), key=lambda i: (-log_probs[i], i))[:top_k]
    mass = np.exp([log_probs[i] for i in order])
    mass, kept, total = mass / mass.sum(), [], 0.0
    for token_id, share in zip(order, mass, strict=True):
        if kept and total >= top_p:
            break
        kept.append(token_id)
        total += share
    return kept, np.log(mass[: len(kept)] / mass[: len(kept)].sum())


@pytest.mark.parametrize(("top_k", "top_p"), [(8, 0.9), (20, 0.5), (1, 1.0), (12, 1e-6), (TRUE_VOCAB + 50, 1.0)])
def test_support_rows_are_the_filtered_distribution(engine, model, top_k, top_p):
    params = {"top_k": top_k, "top_p": top_p}
    prompts = [[5, 6, 7], [8, 9]]
    # A head wider than the support, so that what lies between them must not count.
    answers = engine.generate([body(prompt, top=40, params=params, **AS_SUPPORT) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        full = reference_log_probs(model, prompt, answer["output_ids"], 0.8).numpy()
        meta = answer["meta_info"]
        assert meta["output_token_sampling_mask_length"] == 6
        np.testing.assert_allclose(token_log_probs(answer), full[np.arange(6), answer["output_ids"]], atol=1e-5)
        rows = zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], full, strict=True)
        for token_id, (ids, values, row) in zip(answer["output_ids"], rows, strict=True):
            expected_ids, expected = filtered(row, top_k, top_p)
            assert ids.count(token_id) == 1 and set(ids) == set(expected_ids)
            assert sum(np.exp(values)) == pytest.approx(1.0, abs=1e-6)
            np.testing.assert_allclose(values, expected, atol=1e-5)


def test_selected_mode_with_a_mask_gives_the_tokens_support_log_prob(engine):
    params = {"top_k": 8, "top_p": 0.9, "sampling_seed": 4}
    support, selected = engine.generate([body(params=params, **AS_SUPPORT), body(params=params, return_sampling_mask=True)])
    rows, values = (support["meta_info"][f"output_token_sampling_{name}"] for name in ("mask", "logprobs"))
    picked = [row[ids.index(t)] for t, ids, row in zip(support["output_ids"], rows, values, strict=True)]
    assert selected["output_ids"] == support["output_ids"]
    assert selected["meta_info"]["output_token_sampling_logprobs"] == picked


def test_ties_are_broken_by_id_whatever_the_width():
    values = torch.tensor([[1.0, 2.0, 2.0, -0.5, 2.0, 1.0, -0.5]])
    for width in range(1, 8):
        top, ids = ordered_top(values, width)
        assert ids[0].tolist() == [1, 2, 4, 0, 5, 3, 6][:width]
        assert torch.equal(top, values.gather(1, ids))


def test_the_draw_never_hits_a_mass_of_zero():
    log_probs = torch.tensor([[-torch.inf, 0.5, -torch.inf]]).log_softmax(-1).expand(4, 3)
    uniforms = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(log_probs, uniforms).tolist() == [1, 1, 1, 1]


def test_greedy_is_the_argmax_at_temperature_one(engine, model):
    (answer,) = engine.generate([body(params={"temperature": 0.0}, top=3)])
    full = reference_log_probs(model, [5, 6, 7], answer["output_ids"], 1.0)
    assert answer["output_ids"] == full.argmax(-1).tolist()
    np.testing.assert_allclose(token_log_probs(answer), full.max(-1).values.numpy(), atol=1e-5)
    (masked,) = engine.generate([body(params={"temperature": 0}, **AS_SUPPORT)])
    assert masked["meta_info"]["output_token_sampling_mask"] == [[token_id] for token_id in answer["output_ids"]]
    assert masked["meta_info"]["output_token_sampling_logprobs"] == [[0.0]] * 6


def chi_square_excess(counts, probs):
    """Standard deviations above the mean, with cells of fewer than five expected counts put together."""
    expected = probs * counts.sum()
    rare = expected < 5
    cells = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, expected = (cell[cells[1] > 0] for cell in cells)
    freedom = len(observed) - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("filtered_mode", [False, True])
def test_frequencies_follow_the_reported_distribution(engine, filtered_mode):
    params = {"temperature": 1.3, "max_new_tokens": 1, **({"top_k": 40, "top_p": 0.9} if filtered_mode else {})}
    record = AS_SUPPORT if filtered_mode else {"top_logprobs_num": TRUE_VOCAB, **AS_B64}
    (reported,) = engine.generate([body(params=params, **record)])
    probs = np.zeros(TRUE_VOCAB)
    if filtered_mode:
        meta = reported["meta_info"]
        probs[meta["output_token_sampling_mask"][0]] = np.exp(meta["output_token_sampling_logprobs"][0])
    else:
        ids, values = head_arrays(reported["meta_info"], 1)
        probs[ids[0]] = np.exp(values[0].astype(float))
    answers = engine.generate([{"input_ids": [5, 6, 7], "sampling_params": params}] * 20000)
    counts = np.bincount([answer["output_ids"][0] for answer in answers], minlength=TRUE_VOCAB)
    assert counts[probs == 0].sum() == 0
    assert abs(chi_square_excess(counts, probs)) < 4
    assert chi_square_excess(counts, np.full(TRUE_VOCAB, 1 / TRUE_VOCAB)) > 50


def mixed_requests():
    rng = np.random.default_rng(0)
    bodies = []
    for index in range(48):
        prompt = rng.integers(2, TRUE_VOCAB, size=rng.integers(1, 12)).tolist()
        params = {"max_new_tokens": int(rng.integers(1, 24)), "sampling_seed": index, "ignore_eos": index % 2 == 0}
        params["temperature"] = [0.0, 0.7, 1.0, 1.4][index % 4]
        if index == 2:
            params["max_new_tokens"] = 80
        params["stop_token_ids"] = list(range(100, 160)) if index % 3 == 0 else None
        if index % 5 == 0:
            bodies.append(body(prompt, params={**params, "top_k": 8, "max_new_tokens": 3}, **AS_SUPPORT))
        elif index % 5 == 1:
            bodies.append(body(prompt, params={**params, "top_p": 0.8}, top=4))
        else:
            bodies.append(body(prompt, params=params, top=index % 7))
    return bodies


@pytest.mark.parametrize("max_batch_tokens", [65536, 100, 1])
def test_a_batch_answers_as_one_by_one(model, max_batch_tokens):
    bodies = mixed_requests()
    batched = build_engine(model, max_batch_tokens=max_batch_tokens).generate(bodies)
    alone = [build_engine(model).generate([one])[0] for one in bodies]
    for request_body, a, b in zip(bodies, batched, alone, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert a["meta_info"]["finish_reason"] == b["meta_info"]["finish_reason"]
        np.testing.assert_allclose(token_log_probs(a), token_log_probs(b), atol=1e-5)
        if request_body.get("top_logprobs_num"):
            (ids, values), (other_ids, other_values) = (head_arrays(x["meta_info"], 0) for x in (a, b))
            assert ids.shape == (len(a["output_ids"]), request_body["top_logprobs_num"])
            np.testing.assert_array_equal(ids, other_ids)
            np.testing.assert_allclose(values, other_values, atol=1e-5)
    assert {a["meta_info"]["finish_reason"]["type"] for a in batched} == {"length", "stop"}


def test_streams_differ_between_requests_seeds_and_calls(model):
    def outputs(seed, *seeds):
        engine = build_engine(model, seed=seed)
        calls = [[body(params={"sampling_seed": s, "temperature": 2.0}) for s in seeds]] * 2
        return [tuple(answer["output_ids"]) for call in calls for answer in engine.generate(call)]

    counted = outputs(3, None, None)
    assert len(set(counted)) == 4 and counted == outputs(3, None, None)
    assert not set(counted) & set(outputs(4, None, None))
    seeded = outputs(3, 0, 1)
    assert seeded[:2] == seeded[2:] and len(set(seeded)) == 2 and not set(seeded) & set(counted)


def test_a_stop_token_ends_a_row_and_is_kept_in_it(model):
    text = {"detokenize": lambda ids: " ".join(map(str, ids))}
    (free,) = build_engine(model).generate([body(params={"sampling_seed": 2})])
    stop = free["output_ids"][3]
    first = free["output_ids"].index(stop)
    engine = build_engine(model, stop_token_ids=[stop], **text)
    params = {"sampling_seed": 2, "ignore_eos": False}
    stopped, ignored, own, exact = engine.generate(
        [
            body(params=params),
            body(params={"sampling_seed": 2, "stop_token_ids": [stop]}),
            body(params={**params, "stop_token_ids": [free["output_ids"][0]]}),
            body(params={**params, "max_new_tokens": first + 1}),
        ]
    )
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == " ".join(map(str, free["output_ids"][:first]))
    assert ignored["output_ids"] == free["output_ids"]
    assert ignored["text"] == " ".join(map(str, free["output_ids"]))
    assert own["output_ids"] == free["output_ids"][:1]
    assert exact["meta_info"]["finish_reason"] == {"type": "length", "length": first + 1}


def test_zero_tokens_hold_no_row(engine):
    none = {"max_new_tokens": 0}
    bodies = [body(top=8, params=none), body(top=8, params=none, **AS_FLAT), body(top=8, params=none, **AS_B64)]
    bodies += [body(params={**none, "top_k": 4}, **AS_SUPPORT), body(params={"max_new_tokens": 2})]
    nested, flat, base64, support, two = engine.generate(bodies)
    for answer in (nested, flat, base64, support):
        meta = answer["meta_info"]
        assert answer["text"] == "" and answer["output_ids"] == [] == meta["output_token_logprobs"]
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
    assert nested["meta_info"]["output_top_logprobs"] == []
    assert flat["meta_info"]["output_top_logprobs_shape"] == [0, 8] == base64["meta_info"]["output_top_logprobs_shape"]
    assert flat["meta_info"]["output_top_logprobs_val_flat"] == []
    assert base64["meta_info"]["output_top_logprobs_idx_flat_b64"] == ""
    assert support["meta_info"]["output_token_sampling_mask"] == []
    assert len(two["output_ids"]) == 2
    assert engine.generate([]) == []


def test_a_refused_call_draws_nothing(model):
    engine, other = build_engine(model), build_engine(model)
    with pytest.raises(ValueError, match="request 1 of 2: top_logprobs_num=501"):
        engine.generate([body(), body(top=TRUE_VOCAB + 1)])
    assert engine.generate([body()])[0]["output_ids"] == other.generate([body()])[0]["output_ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 513}, "vocab_size=513"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"pad_token_id": 512}, "pad_token_id=512"),
        ({"seed": -1}, "seed=-1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0"),
        ({"stop_token_ids": [TRUE_VOCAB]}, f"stop_token_ids={TRUE_VOCAB}"),
    ],
)
def test_bad_arguments_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        build_engine(model, **changes)


def test_logits_that_are_not_finite_are_an_error():
    broken = build_model()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        build_engine(broken).generate([body()])


def test_learned_positions_survive_finished_rows_at_the_limit():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=TRUE_VOCAB, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    engine = build_engine(transformers.GPT2LMHeadModel(config), stop_token_ids=[])
    bodies = [body([3] * (12 - count), params={"max_new_tokens": count}) for count in (2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8)]
    lengths = [len(answer["output_ids"]) for answer in engine.generate(bodies)]
    assert lengths == [one["sampling_params"]["max_new_tokens"] for one in bodies]
