"""What the embedded engine refuses, by name, and how it reads what it takes."""

import numpy as np
import pytest

from miles_sc.rollout.engines.native_request import ModelLimits, parse_request

LIMITS = ModelLimits(vocab_size=500, max_positions=64, stop_token_ids=(1,))


def parse(params=(), **fields):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, **dict(params)}, **fields}
    return parse_request(body, LIMITS, place="request 2 of 4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "hello", "stream": True}, r"stream, text not supported.*remove"),
        ({"params": {"frequency_penalty": 1.0}}, r"sampling_params\.frequency_penalty not supported.*remove"),
        ({"sampling_params": [{}]}, r"sampling_params=\[\{\}\].*one object"),
        ({"input_ids": []}, r"input_ids is empty; send"),
        ({"input_ids": None}, r"input_ids is empty; send"),
        ({"input_ids": [[5], [6]]}, r"input_ids has shape \[2, 1\].*one flat list"),
        ({"input_ids": [[5], [6, 7]]}, r"input_ids is ragged.*one flat list"),
        ({"input_ids": [5.0, 6.5]}, r"input_ids has .* dtype float64"),
        ({"input_ids": [5, 500]}, r"input_ids\[1\]=500 is outside the vocabulary \[0, 500\)"),
        ({"input_ids": [-1, 5]}, r"input_ids\[0\]=-1 is outside"),
        ({"params": {"temperature": -0.5}}, r"temperature=-0\.5 .*set"),
        ({"params": {"temperature": float("inf")}}, r"temperature=inf"),
        ({"params": {"temperature": float("nan")}}, r"temperature=nan"),
        ({"params": {"temperature": 1e-9}}, r"temperature=1e-09"),
        ({"params": {"temperature": "1"}}, r"temperature='1' is a str; send a JSON number"),
        ({"params": {"top_p": 0.0}}, r"top_p=0\.0 is outside \(0, 1\]; set"),
        ({"params": {"top_p": 1.5}}, r"top_p=1\.5 is outside"),
        ({"params": {"top_p": float("nan")}}, r"top_p=nan is outside"),
        ({"params": {"top_k": 0}}, r"top_k=0 is neither"),
        ({"params": {"top_k": -2}}, r"top_k=-2 is neither"),
        ({"params": {"top_k": 2.5}}, r"top_k=2\.5 is a float; send a JSON integer"),
        ({"params": {"top_k": True}}, r"top_k=True is a bool"),
        ({"params": {"min_p": 0.1}}, r"min_p=0\.1 is not supported.*set 0"),
        ({"params": {"max_new_tokens": -1}}, r"max_new_tokens=-1 is negative; set"),
        ({"params": {"max_new_tokens": 62}}, r"3 prompt tokens and max_new_tokens=62 .*=64;.*at most 61"),
        ({"params": {"stop_token_ids": [3, 777]}}, r"stop_token_ids\[1\]=777 is outside"),
        ({"params": {"sampling_seed": -4}}, r"sampling_seed=-4 is negative"),
        ({"params": {"ignore_eos": 1}}, r"ignore_eos=1 is a int; send a JSON boolean"),
        ({"return_logprob": True, "top_logprobs_num": 501}, r"top_logprobs_num=501 .*vocabulary.*server stops"),
        ({"return_logprob": True, "top_logprobs_num": -1}, r"top_logprobs_num=-1 is outside"),
        ({"top_logprobs_num": 4}, r"top_logprobs_num=4 without return_logprob; set"),
        (
            {"return_flat_raw_output_top_logprobs": True},
            r"return_flat_raw_output_top_logprobs without top",
        ),
        ({"return_flat_raw_top_logprobs_b64": True}, r"b64 without return_flat_raw_output_top_logprobs; set both"),
        ({"sampling_logprobs_mode": "support"}, r"sampling_logprobs_mode='support' can only be set when"),
        (
            {"return_sampling_mask": True, "sampling_logprobs_mode": "all"},
            r"sampling_logprobs_mode='all' is not",
        ),
        ({"return_sampling_mask": True}, r"return_sampling_mask with no top_k \(-1\).*set top_k in \[1, 4096\]"),
        ({"return_sampling_mask": True, "params": {"top_k": 4097}}, r"return_sampling_mask with top_k=4097"),
    ],
)
def test_refusals_name_place_value_and_remedy(fields, message):
    with pytest.raises(ValueError, match="request 2 of 4: .*" + message):
        parse(**fields)


def test_null_counts_as_absent_and_defaults_are_the_servers():
    nulls = {name: None for name in ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "sampling_seed")}
    limits = ModelLimits(500, None, (1,))
    absent = parse_request({"input_ids": [5]}, limits, place="here")
    assert parse_request({"input_ids": [5], "sampling_params": nulls, "top_logprobs_num": None}, limits, place="") == absent
    assert (absent.temperature, absent.top_p, absent.top_k, absent.max_new_tokens) == (1.0, 1.0, 500, 128)
    assert absent.stop_token_ids == (1,) and absent.sampling_seed is None and not absent.from_support


def test_numbers_of_numpy_are_read():
    request = parse({"temperature": np.float32(0.5), "top_k": np.int64(3)}, input_ids=np.array([5, 6], np.int32))
    assert (request.temperature, request.top_k, request.input_ids) == (0.5, 3, (5, 6))


def test_greedy_is_top_one_at_temperature_one():
    request = parse({"temperature": 0})
    assert (request.temperature, request.top_k, request.from_support) == (1.0, 1, True)
    assert parse({"temperature": 0}, return_sampling_mask=True).sampling_mask


def test_stop_tokens_join_the_engines_unless_ignored():
    assert parse({"stop_token_ids": [9, 1, 4]}).stop_token_ids == (1, 4, 9)
    assert parse({"stop_token_ids": [9], "ignore_eos": True}).stop_token_ids == ()


@pytest.mark.parametrize(
    ("params", "fields", "expected"),
    [
        ({}, {}, False),
        ({"top_k": 500}, {}, False),
        ({"top_k": 499}, {}, True),
        ({"top_p": 0.9}, {}, True),
        ({"top_k": 600}, {"return_sampling_mask": True}, True),
    ],
)
def test_a_draw_comes_from_the_support_where_a_filter_or_the_mask_asks(params, fields, expected):
    assert parse(params, **fields).from_support is expected
