"""Requests and answers of the real Miles on a real SGLang: native, the older generate, tools, merging, sessions."""

from types import SimpleNamespace

import numpy as np
import pytest

from miles_sc.rollout.recorded_rows import RecordedRows
from tests.hosts import miles_rollout
from tests.hosts.miles_host import RECIPE, needs_miles
from tests.hosts.miles_rollout import agentic, fresh_sample, generate, in_miles, merged_turns, rollout_run, session_server

pytestmark = needs_miles

K = 4
FILTERED = ["--rollout-top-k", "4", "--rollout-top-p", "0.9"]
GENERATORS = pytest.mark.parametrize("legacy", [False, True], ids=["native", "legacy"])
VERSIONS = pytest.mark.parametrize("version", ["v1", "v2"])


@pytest.fixture
def run(engine):
    return rollout_run(str(engine.model), engine.url, *RECIPE)


@pytest.fixture
def filtered_run(filtering_engine):
    """As if Miles's own SGLang knew the flag; the engine of this run does."""
    run = rollout_run(str(filtering_engine.model), filtering_engine.url, *RECIPE)
    run.rollout_top_k, run.rollout_top_p = 4, 0.9
    return run


@pytest.fixture(autouse=True)
def no_wishes():
    miles_rollout.ASKED.clear()


def check_rows(sample, *, filtered=False):
    """One valid row per token, in agreement with what Miles itself recorded; gaps where nobody sampled."""
    sample.validate()
    rows, response = RecordedRows.of(sample), np.array(sample.tokens[len(sample.tokens) - sample.response_length :])
    assert len(rows) == sample.response_length == len(sample.rollout_log_probs)
    trained = np.ones(len(rows), bool) if sample.loss_mask is None else np.array(sample.loss_mask) > 0
    assert trained.any()
    rows.candidates.validate(
        sampled_token_ids=response, sampled_log_probs=np.array(sample.rollout_log_probs), trained=trained, complete=filtered
    )
    assert (rows.candidates.token_ids[~trained] == -1).all()
    assert (rows.support is not None) == filtered
    if filtered:
        ids = np.split(rows.support.ids, rows.support.offsets[1:-1])
        assert all(token in row for token, row in zip(response, ids, strict=True))
        assert all(list(row) == [token] for token, row in zip(response[~trained], np.array(ids, object)[~trained], strict=True))
    return rows


@GENERATORS
def test_a_generation_records_its_rows(run, legacy):
    sample = in_miles(run, lambda: generate(run, fresh_sample(), legacy=legacy))
    rows = check_rows(sample)
    assert rows.candidates.k == K and (np.diff(rows.candidates.log_probs, axis=1) <= 0).all()
    assert len(sample.weight_versions) == 1  # Miles's own list, one entry per call, is left to Miles


@GENERATORS
def test_filtered_sampling_records_its_support(filtered_run, legacy):
    check_rows(in_miles(filtered_run, lambda: generate(filtered_run, fresh_sample(), legacy=legacy)), filtered=True)


@GENERATORS
def test_evaluation_is_left_alone(run, legacy):
    sample = in_miles(run, lambda: generate(run, fresh_sample(), legacy=legacy, evaluation=True))
    assert sample.response_length > 0 and RecordedRows.of(sample) is None


@GENERATORS
def test_a_partial_rollout_is_continued(run, legacy):
    """Each call keeps the rows of the weights that sampled it."""
    from miles.utils.types import Sample

    run.rollout_stop_token_ids, run.rollout_max_response_len = [], 40

    async def two_calls():
        first = await generate(run, fresh_sample(), legacy=legacy, length=3)
        kept = RecordedRows.of(first).candidates
        first.status = Sample.Status.ABORTED
        return kept, await generate(run, first, legacy=legacy, length=40)

    while True:
        kept, sample = in_miles(run, two_calls)
        if len(kept) == 3 and sample.response_length > 3:  # no end of text in the first call
            break
    rows = check_rows(sample).candidates
    np.testing.assert_array_equal(rows.token_ids[:3], kept.token_ids)
    np.testing.assert_array_equal(rows.log_probs[:3], kept.log_probs)


def test_a_lora_runs_own_adapter_stays(run):
    """Its name is in every training request of such a run, and is the policy; a client's is not."""
    from miles.rollout.generate_utils.generate_endpoint_utils import compute_request_payload
    from miles.utils.lora import LORA_ADAPTER_NAME

    run.lora_rank = 8
    payload, _ = compute_request_payload(run, [1, 2], {"max_new_tokens": 4})
    assert payload["lora_path"] == LORA_ADAPTER_NAME and payload["top_logprobs_num"] == K


def test_tools_answers_are_gaps(run, monkeypatch):
    """Miles's multi-turn generate; the tiny model writes no tool call, so the parser finds one in whatever it writes."""
    from miles.rollout.generate_hub import multi_turn

    calls = iter([[SimpleNamespace()], []])
    parser = SimpleNamespace(parse_non_stream=lambda text: (text, next(calls)))
    monkeypatch.setattr(multi_turn, "create_tool_call_parser", lambda *_: parser)
    monkeypatch.setattr(multi_turn, "load_function", lambda path: [])

    async def answer(tool_calls, execute):
        return [{"role": "tool", "tool_call_id": "1", "content": "7", "name": "add"}]

    monkeypatch.setattr(multi_turn, "execute_tool_calls", answer)
    run.custom_generate_function_path = "miles.rollout.generate_hub.multi_turn.generate"
    vars(run).update(generate_max_turns=2, generate_tool_specs_path="-", generate_tool_call_parser="-",
                     generate_execute_tool_function_path="-")  # fmt: skip
    prompt = [{"role": "user", "content": "3 + 4 ="}]
    while True:  # a first turn that ends by itself is answered by the tool
        calls = iter([[SimpleNamespace()], []])
        sample = in_miles(run, lambda: generate(run, fresh_sample(prompt), length=30))
        if 0 in sample.loss_mask:
            break
    check_rows(sample)


def test_turns_are_merged(run):
    from miles.rollout.generate_utils.sample_utils import merge_samples

    (first, second), merged, told = in_miles(run, lambda: merged_turns(run))
    rows = RecordedRows.of(merged)
    merged.validate()
    assert len(rows) == first.response_length + told + second.response_length == merged.response_length
    assert merged.loss_mask == [1] * first.response_length + [0] * told + [1] * second.response_length
    joined = [first.rollout_topk_token_ids, np.full((told, K), -1), second.rollout_topk_token_ids]
    np.testing.assert_array_equal(rows.candidates.token_ids, np.concatenate(joined))
    assert RecordedRows.of(first) is not None  # the turns keep theirs

    second.rollout_topk_token_ids = second.rollout_topk_log_probs = None
    with pytest.raises(ValueError, match="the second of two turns has no recorded candidates"):
        merge_samples([first, second], SimpleNamespace(decode=lambda ids: ""))


def test_a_sample_carries_its_rows(run):
    """Through a dict, a strip and a retry, as partial rollouts and debug dumps do."""
    from miles.utils.types import Sample

    sample = in_miles(run, lambda: generate(run, fresh_sample(), length=12))
    copy = Sample.from_dict(sample.to_dict())
    np.testing.assert_array_equal(copy.rollout_topk_log_probs, sample.rollout_topk_log_probs)
    kept = sample.response_length - 1
    copy.strip_last_output_tokens(1, SimpleNamespace(decode=lambda ids: ""))
    np.testing.assert_array_equal(copy.rollout_topk_token_ids, sample.rollout_topk_token_ids[:kept])
    copy.rollout_topk_token_ids = sample.rollout_topk_token_ids
    copy.rollout_topk_log_probs = sample.rollout_topk_log_probs
    with pytest.raises(ValueError, match=f"has {kept + 1} rows for a response of {kept} tokens"):
        copy.validate()
    copy.reset_for_retry()
    assert RecordedRows.of(copy) is None and not {"rollout_topk_token_ids"} & set(copy.to_dict())


@VERSIONS
def test_a_session_records_a_conversation(run, version):
    with session_server(run, version):
        (sample,) = conversation(run)
    check_rows(sample)
    assert 0 in sample.loss_mask and sample.loss_mask[-1] == 1


@VERSIONS
def test_a_filtered_session_records_supports(filtered_run, version):
    with session_server(filtered_run, version):
        (sample,) = conversation(filtered_run)
    check_rows(sample, filtered=True)


@VERSIONS
def test_an_evaluating_session_is_left_alone(run, version):
    with session_server(run, version):
        (sample,) = conversation(run, evaluation=True)
    assert sample.response_length > 0 and RecordedRows.of(sample) is None


@VERSIONS
@pytest.mark.parametrize("alternatives", [None, 2])
def test_an_agent_is_told_what_it_asked_for(run, version, alternatives):
    if alternatives:
        miles_rollout.ASKED.update(logprobs=True, top_logprobs=alternatives)
    with session_server(run, version):
        (sample,) = conversation(run)
    check_rows(sample)
    for reply in miles_rollout.TOLD:
        (choice,) = reply.json()["choices"]
        assert not [name for name in choice["meta_info"] if "top_logprobs" in name]
        assert {len(token["top_logprobs"]) for token in choice["logprobs"]["content"]} == {alternatives or 0}


@VERSIONS
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": 0.5}, "temperature = 0.5 in a training request"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 9}, "top_logprobs = 9: the run records --rollout-top-logprobs-num 4"),
    ],
)
def test_an_agent_that_would_sample_otherwise_is_refused(run, version, asked, told):
    miles_rollout.ASKED.update(asked)
    with session_server(run, version):
        in_miles(run, lambda: agentic(run))
    (reply,) = miles_rollout.TOLD
    assert reply.status_code == 400 and told in reply.text


@VERSIONS
def test_a_long_conversation_is_cut_with_its_rows(run, version):
    with session_server(run, version):
        (whole,) = conversation(run)
        run.max_seq_len = len(whole.tokens) - whole.response_length + 2
        while True:
            (sample,) = in_miles(run, lambda: agentic(run, length=30))
            if sample.response_length == 2:
                break
    check_rows(sample)


def conversation(run, **how):
    """Two turns; a first turn that fills its limit ends a conversation, so such a one is tried again."""
    while True:
        samples = in_miles(run, lambda: agentic(run, length=30, **how))
        if len(miles_rollout.TOLD) == 2 and all(reply.status_code == 200 for reply in miles_rollout.TOLD):
            if all(0 in sample.loss_mask for sample in samples):
                return samples
