"""What is asked of an engine, and which calls are refused."""

import copy

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout import configure_request

SELECTED = ScoreCenteringConfig(top_logprobs_num=8, temperature=0.7)
SUPPORT = ScoreCenteringConfig(top_logprobs_num=8, temperature=0.7, top_p=0.9, top_k=6)
OFF = ScoreCenteringConfig(temperature=0.7)
CONFIGS = {"selected": SELECTED, "support": SUPPORT}
SAMPLER = {
    "selected": {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    "support": {"temperature": 0.7, "top_p": 0.9, "top_k": 6, "min_p": 0.0},
}
FLAT = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
UNPENALISED = {"repetition_penalty": 1.0}  # chat would take a model's own from its generation config
MASK = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
ASKED = {  # (mode, openai)
    ("selected", False): {"return_logprob": True, "top_logprobs_num": 8, **FLAT},
    ("selected", True): {"logprobs": True, "top_logprobs": 8, "return_meta_info": True, **FLAT},
    ("support", False): {"return_logprob": True, **MASK},
    ("support", True): {"logprobs": True, "return_meta_info": True, **MASK},
}
BODY = {False: {"input_ids": [1, 2], "sampling_params": {}}, True: {"model": "x", "messages": []}}


def request(openai, **sampling):
    body = copy.deepcopy(BODY[openai])
    (body if openai else body["sampling_params"]).update(sampling)
    return body


def sampling_of(body, openai):
    return body if openai else body["sampling_params"]


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"max_new_tokens": 5, "stop": ["e"]}, {"temperature": None, "top_p": None, "top_k": None, "min_p": None}],
)
def test_everything_is_asked_for_and_the_sampler_written_out(mode, openai, sampling):
    body = request(openai, **sampling)
    kept = {name: value for name, value in sampling.items() if value is not None}
    configured = configure_request(CONFIGS[mode], body, openai=openai)
    if openai:
        assert configured == BODY[True] | kept | SAMPLER[mode] | UNPENALISED | ASKED[mode, True]
    else:
        assert configured == {"input_ids": [1, 2], "sampling_params": kept | SAMPLER[mode]} | ASKED[mode, False]


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize("mode", CONFIGS)
def test_the_runs_count_and_mode_override_the_clients(mode, openai):
    theirs = {
        "top_logprobs": 2,
        "top_logprobs_num": 3,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "selected",
    }
    refused = {"logprobs": False, "return_meta_info": False} if openai else {"return_logprob": False}
    body = BODY[openai] | theirs | refused
    assert configure_request(CONFIGS[mode], body, openai=openai) == configure_request(CONFIGS[mode], BODY[openai], openai=openai)


@pytest.mark.parametrize("body", [{"input_ids": [1]}, {"input_ids": [1], "sampling_params": None}])
def test_a_native_request_may_leave_its_sampling_parameters_out(body):
    assert configure_request(SELECTED, body)["sampling_params"] == SAMPLER["selected"]


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize(("config", "evaluation"), [(OFF, False), (OFF, True), (SELECTED, True), (SUPPORT, True)])
def test_off_and_evaluation_leave_a_request_as_it_is(config, evaluation, openai):
    body = request(openai, temperature=0.0, regex="a+", top_logprobs=2, top_p=None)
    configured = configure_request(config, body, openai=openai, evaluation=evaluation)
    assert configured == body and list(configured) == list(body)


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize("config", [OFF, SELECTED, SUPPORT])
def test_the_argument_is_not_touched_nor_shared(config, openai):
    body = request(openai, stop=["e"], top_logprobs=2)
    before = copy.deepcopy(body)
    configured = configure_request(config, body, openai=openai)
    sampling_of(configured, openai)["stop"].append("x")
    assert body == before


REFUSED = [  # config, sampling fields, message
    (
        SELECTED,
        {"temperature": 1.0},
        "temperature = 1.0 in a training request: .*--rollout-temperature 0.7; leave it out",
    ),
    (SELECTED, {"temperature": 0.0}, "temperature = 0.0"),
    (SELECTED, {"temperature": -0.7}, "temperature = -0.7"),
    (SELECTED, {"temperature": float("nan")}, "temperature = nan"),
    (SELECTED, {"temperature": float("inf")}, "temperature = inf"),
    (SELECTED, {"temperature": "0.7"}, "temperature = '0.7' .*give a number"),
    (SELECTED, {"min_p": 0.1}, "min_p = 0.1 .*leave it out or set 0"),
    (
        SELECTED,
        {"min_p": None, "top_p": 0.9},
        "top_p = 0.9 .*filtered sampling in an unfiltered run; set --rollout-top-k",
    ),
    (SELECTED, {"top_k": 4}, "top_k = 4 .*filtered sampling in an unfiltered run"),
    (SELECTED, {"top_p": "0.9"}, "top_p = '0.9' .*give a number"),
    (SELECTED, {"top_p": float("nan")}, r"top_p = nan .*\(0, 1\]"),
    (SELECTED, {"top_p": 0.0}, r"top_p = 0.0 .*\(0, 1\]"),
    (SELECTED, {"top_p": 1.5}, r"top_p = 1.5 .*\(0, 1\]"),
    (SELECTED, {"top_k": True}, "top_k = True .*give a number"),
    (SUPPORT, {"temperature": 1.0}, "temperature = 1.0"),
    (SUPPORT, {"top_k": -1}, "top_k = -1 .*unfiltered sampling in a filtered run; leave it out, the run's is 6"),
    (SUPPORT, {"top_k": 0}, "top_k = 0 .*unfiltered sampling"),
    (SUPPORT, {"top_k": 9}, "top_k = 9 .*only --rollout-top-logprobs-num 8 candidates are recorded; lower it"),
    *((SUPPORT, {name: "x"}, f"{name} = 'x' .*leave it out") for name in ("json_schema", "regex", "ebnf", "structural_tag")),
    (SELECTED, {"custom_logit_processor": "x"}, "custom_logit_processor = 'x'"),
    (SELECTED, {"logit_bias": {"5": 1.0}}, "logit_bias = "),
    (SELECTED, {"frequency_penalty": 0.1}, "frequency_penalty = 0.1 .*leave it out or set 0.0"),
    (SELECTED, {"presence_penalty": -0.1}, "presence_penalty = -0.1"),
    (SUPPORT, {"repetition_penalty": 1.1}, "repetition_penalty = 1.1 .*set 1.0"),
    (SELECTED, {"response_format": {"type": "json_object"}}, "response_format = .*ask for text"),
    (SELECTED, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format = "),
    (SELECTED, {"response_format": "json_object"}, "response_format = 'json_object'"),
    (SELECTED, {"tool_choice": "required"}, "tool_choice = 'required' .*use auto or none"),
    (SELECTED, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice = "),
    (SELECTED, {"tools": [{"function": {"name": "g"}}, {"function": {"strict": True}}]}, "tools = .*leave strict out"),
    (SELECTED, {"tools": [{"strict": True}], "tool_choice": "auto"}, "tools = "),
    (SELECTED, {"watermark": {"key": "x"}}, "watermark = .*leave it out"),
    (SELECTED, {"lora_path": "adapter"}, "lora_path = 'adapter' .*not the trained policy's"),
    (SELECTED, {"min_new_tokens": 3}, "min_new_tokens = 3 .*forbids the stop tokens"),
    (SELECTED, {"min_tokens": 3}, "min_tokens = 3 .*forbids the stop tokens"),
]


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize(("config", "sampling", "message"), REFUSED)
def test_a_call_that_samples_from_another_distribution_is_refused(config, sampling, message, openai):
    with pytest.raises(ValueError, match=message):
        configure_request(config, request(openai, **sampling), openai=openai)


@pytest.mark.parametrize("field", ["custom_logit_processor", "watermark", "lora_path", "session_params", "input_embeds"])
def test_what_stands_beside_native_sampling_parameters_is_refused_there(field):
    with pytest.raises(ValueError, match=f"{field} = 'x' in a training request"):
        configure_request(SELECTED, {"input_ids": [1], field: "x"})


def test_a_batch_is_refused():
    with pytest.raises(
        ValueError, match="sampling_params = .* in a training request: give one mapping; a batch is a request each"
    ):
        configure_request(SELECTED, {"input_ids": [[1], [2]], "sampling_params": [{}, {}]})


@pytest.mark.parametrize(
    "sampling",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tool_choice": "auto", "tools": [{"function": {"strict": False}}]},
        {"tool_choice": "none", "tools": [{"function": {"strict": True}}]},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1},
        {"regex": None, "logit_bias": {}, "ebnf": ""},
        {"temperature": 0.7, "min_p": 0},
        {"min_tokens": 0, "watermark": None, "lora_path": None},
    ],
)
def test_neutral_values_pass_and_stay(sampling):
    configured = configure_request(SELECTED, request(True, **sampling), openai=True)
    assert {name: configured[name] for name in sampling} == sampling


def test_a_filtered_call_may_filter_more_than_its_run():
    configured = configure_request(SUPPORT, request(False, top_p=0.5, top_k=8))
    assert configured["sampling_params"] == SAMPLER["support"] | {"top_p": 0.5, "top_k": 8}
