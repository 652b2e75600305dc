"""Slime's rollout side: every seam is there, flags, requests and answers, a Sample's life; against the real Slime."""

import asyncio
import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from miles_sc.hosts.activation import activation
from miles_sc.hosts.seams import HostSource
from miles_sc.hosts.slime import HOST
from miles_sc.hosts.slime_rollout import STREAMING, RecordingManager
from miles_sc.rollout import probe
from miles_sc.rollout.recorded_rows import RecordedRows
from tests.hosts.slime_host import needs_slime, needs_source, parse, run_of, source
from tests.samples import PROMPT, K, answer, support_answer

# --- seams

NEEDS_MEGATRONS_FORK = {"slime.backends.megatron_utils.model"}


@needs_source
def test_every_seam_is_as_it_must_be():
    assert source().check(HOST.seams) == []


@needs_source
def test_a_changed_slime_is_noticed(tmp_path):
    """Its loss no longer chooses as we know it, and a module is gone: both are named, with what is lost."""
    changed = tmp_path / "slime" / "backends" / "megatron_utils"
    changed.mkdir(parents=True)
    (changed / "loss.py").write_text("def loss_function(args, batch, logits): ...")
    faults = "\n".join(str(fault) for fault in HostSource([str(tmp_path / "slime")]).check(HOST.seams))
    assert "megatron_utils.loss.loss_function: its parameters are (args, batch, logits)" in faults
    assert "without it the loss is unknown" in faults
    assert "slime.utils.arguments.slime_validate_args: there is no such module" in faults


@needs_slime
def test_what_has_been_imported_is_wrapped():
    active = activation("slime")
    active.require()
    touched = {seam.name: seam.module for seam in HOST.seams if seam.wrap or seam.replace}
    for module in set(touched.values()) - NEEDS_MEGATRONS_FORK:
        importlib.import_module(module)
    assert {name for name, module in touched.items() if module not in NEEDS_MEGATRONS_FORK} <= set(active.installed)


# --- the command line


@needs_slime
def test_the_recipe_parses_and_off_is_off():
    run = run_of()
    assert (run.loss_type, run.rollout_top_logprobs_num, run.score_centering_is) == ("score_centering", 4, "none")
    assert parse().rollout_top_logprobs_num == 0


REFUSED = [
    (["--loss-type", "score_centering"], "--rollout-top-logprobs-num 0"),
    (["--loss-type", "score_centering", "--rollout-top-logprobs-num", "4", "--use-tis"], "--use-tis"),
    (["--loss-type", "score_centering", "--rollout-top-logprobs-num", "4", "--advantage-estimator", "gspo"], "gspo"),
    (["--rollout-top-logprobs-num", "4", "--rollout-top-p", "0.9", "--rollout-top-k", "4"], "--rollout-top-p 0.9: Slime replays"),
    (["--rollout-top-logprobs-num", "4", "--rollout-top-k", "4"], "cannot report the support"),
    (["--rollout-top-logprobs-num", "4", "--custom-generate-function-path", STREAMING], "the square of the response"),
    (["--score-centering-is", "tis"], "--score-centering-is tis"),
]


@needs_slime
@pytest.mark.parametrize(("given", "named"), REFUSED)
def test_an_illegal_command_line_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        parse(*given)


@needs_slime
def test_a_configuration_file_cannot_slip_past(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("loss_type: score_centering\nrollout_top_logprobs_num: 4\nuse_opsm: true\n")
    with pytest.raises(ValueError, match="--use-opsm"):
        parse("--custom-config-path", str(path))


@needs_slime
def test_nor_can_the_one_of_megatrons_roles(tmp_path):
    from slime.utils.arguments import parse_megatron_role_args

    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{name: default, role: actor, overrides: {advantage_estimator: gspo}}]")
    with pytest.raises(ValueError, match="--advantage-estimator gspo"):
        parse_megatron_role_args(run_of(), str(path), "actor")


# --- requests and answers


def sample_of(**fields):
    from slime.utils.types import Sample

    return Sample(index=7, prompt="one two", tokens=list(PROMPT), **fields)


@pytest.fixture
def engine(monkeypatch):
    """``engine(run, sample, *answers, evaluation=...) -> requests``: Slime's generation, its HTTP client stood in."""
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils
    from slime.utils.misc import SingletonMeta

    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(sglang_rollout, "load_processor", lambda *_, **__: None)
    monkeypatch.setattr(sglang_rollout, "async_rm", _reward)

    def generate(run, sample, *answers, evaluation=False):
        requests, coming = [], iter(answers)

        async def client_post(client, url, payload, *_, **__):
            requests.append(payload)
            return {"text": "", "meta_info": next(coming)}

        monkeypatch.setattr(http_utils, "_post", client_post)
        SingletonMeta.clear_instances(sglang_rollout.GenerateState)
        params = sglang_rollout.GenerateState(run).sampling_params
        for _ in answers:
            work = sglang_rollout.generate_and_rm(run, sample, params.copy(), evaluation=evaluation)
            assert asyncio.run(work) is sample
        return requests

    return generate


async def _reward(*_, **__):
    return 1.0


def aborted(meta):
    return meta | {"finish_reason": {"type": "abort"}}


@needs_slime
def test_candidates_are_asked_for_and_recorded_over_a_resumed_response(engine):
    sample = sample_of()
    first, second = engine(run_of(), sample, aborted(answer(2, seed=1)), answer(3, seed=2))
    assert first["top_logprobs_num"] == K and first["sampling_params"]["min_p"] == 0.0
    assert second["input_ids"] == sample.tokens[:-3]
    rows = RecordedRows.of(sample)
    assert len(rows) == sample.response_length == 5 and sample.loss_mask == [1] * 5
    expected = [
        [entry[1] for entry in row] for seed, n in ((1, 2), (2, 3)) for row in answer(n, seed=seed)["output_top_logprobs"]
    ]
    assert rows.candidates.token_ids.tolist() == expected


@needs_slime
def test_a_support_is_recorded_and_its_log_probs_taken(engine):
    run, sample, meta = run_of(rollout_top_k=K, sglang_sampling_mask_max_tokens=K), sample_of(), support_answer(4)
    (request,) = engine(run, sample, meta)
    assert request["sampling_logprobs_mode"] == "support" and "top_logprobs_num" not in request
    assert sample.rollout_sampling_mask.lengths.tolist() == [1, 2, 3, 4]
    held = RecordedRows.of(sample).candidates.holding(np.array(sample.tokens[-4:]))
    assert sample.rollout_log_probs == pytest.approx(sample.rollout_topk_log_probs[held].tolist())


@needs_slime
@pytest.mark.parametrize(
    ("run", "evaluation"), [({}, True), ({"rollout_top_logprobs_num": 0, "loss_type": "policy_loss"}, False)]
)
def test_evaluation_and_off_are_as_without_us(engine, run, evaluation):
    sample = sample_of()
    (request,) = engine(run_of(**run), sample, answer(2), evaluation=evaluation)
    assert set(request) == {"sampling_params", "return_logprob", "input_ids"} and "min_p" not in request["sampling_params"]
    assert RecordedRows.of(sample) is None and "rollout_topk_token_ids" not in sample.to_dict()


@needs_slime
def test_an_answer_without_candidates_appends_nothing(engine):
    sample, meta = sample_of(), answer(3)
    del meta["output_top_logprobs"]
    with pytest.raises(ValueError, match="candidates"):
        engine(run_of(), sample, meta)
    assert (sample.tokens, sample.response_length, sample.rollout_log_probs) == (PROMPT, 0, None)
    assert RecordedRows.of(sample) is None


# --- a Sample's life


@needs_slime
def test_a_users_own_generate_function_only_asks():
    """It passes ``meta_info`` on as Slime wants it; tokens of a tool are gaps."""
    run, sample = run_of(), sample_of()
    for seed, told in ((1, [5, 6]), (2, [])):
        meta = answer(2, seed=seed)
        values, ids, _ = zip(*meta["output_token_logprobs"], strict=True)
        sample.append_response_tokens(run, tokens=ids, log_probs=values, trainable=True, meta_info=meta)
        sample.append_response_tokens(run, tokens=told, trainable=False)
    rows = RecordedRows.of(sample)
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1] and len(rows) == sample.response_length == 6
    assert (rows.candidates.token_ids[2:4] == -1).all() and (rows.candidates.token_ids[4:] >= 0).all()


@needs_slime
def test_its_own_requests_may_also_bring_none():
    """Then nothing is recorded, and the converter refuses the sample by name."""
    run, sample, meta = run_of(), sample_of(), answer(2)
    values, ids, _ = zip(*meta["output_token_logprobs"], strict=True)
    plain = {name: value for name, value in meta.items() if not name.startswith("output_top")}
    sample.append_response_tokens(run, tokens=ids, log_probs=values, trainable=True, meta_info=plain)
    assert RecordedRows.of(sample) is None and sample.response_length == 2


@needs_slime
def test_tokens_that_the_engine_did_not_return_are_refused():
    meta = answer(2)
    with pytest.raises(ValueError, match="must append exactly what the engine returns"):
        sample_of().append_response_tokens(run_of(), tokens=[1], log_probs=[-0.1], trainable=True, meta_info=meta)


@needs_slime
@pytest.mark.parametrize("meta", [answer(3), support_answer(3)], ids=["selected", "support"])
def test_a_dumped_sample_comes_back(tmp_path, engine, meta):
    import torch
    from slime.utils.types import Sample

    sample = sample_of()
    engine(run_of(rollout_top_k=-1 if "output_top_logprobs" in meta else K), sample, meta)
    torch.save(sample.to_dict(), tmp_path / "sample.pt")
    back = Sample.from_dict(torch.load(tmp_path / "sample.pt", weights_only=False))
    for name in ("rollout_topk_token_ids", "rollout_topk_log_probs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(sample, name))
    assert (back.rollout_sampling_mask is None) == (sample.rollout_sampling_mask is None)


# --- the engines


@needs_slime
@pytest.mark.parametrize(("recorded", "value"), [(4, "0"), (0, "true")])
def test_a_server_reports_log_probs_with_the_temperature(monkeypatch, recorded, value):
    from slime.backends.sglang_utils import sglang_engine

    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    seen = []
    monkeypatch.setattr(sglang_engine, "_compute_server_args", lambda *_, **__: ({"node_rank": 0, "host": "h", "port": 1}, []))
    monkeypatch.setattr(sglang_engine, "ServerArgs", lambda **_: None)
    monkeypatch.setattr(sglang_engine, "requests", SimpleNamespace(post=lambda *_, **__: SimpleNamespace(raise_for_status=int)))
    monkeypatch.setattr(
        sglang_engine, "launch_server_process", lambda _: seen.append(sglang_engine.os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"])
    )
    run = run_of(rollout_top_logprobs_num=recorded, loss_type="policy_loss", rollout_external=False)
    sglang_engine.SGLangEngine(run, rank=0).init("127.0.0.1:1", 1, 2, host="127.0.0.1", router_ip="r", router_port=1)
    assert seen == [value]


class Manager:
    """What Slime's manager has made once its own start is over."""

    def __init__(self, args, pg):
        self.rollout_engines = args.engines


@needs_slime
@pytest.mark.parametrize(("engines", "recorded", "asked"), [(["up"], 4, [4]), ([], 4, []), (["up"], 0, [])])
def test_the_route_is_examined_where_engines_are_up(monkeypatch, engines, recorded, asked):
    seen = []

    async def examine(endpoint, wanted):
        seen.append((endpoint, wanted.routes, wanted.configs[0].top_logprobs_num))
        return SimpleNamespace(findings=[])

    monkeypatch.setattr(probe, "examine_endpoint", examine)
    run = run_of(engines=engines, rollout_top_logprobs_num=recorded, sglang_router_ip="r", sglang_router_port=1)
    type("RolloutManager", (RecordingManager, Manager), {})(run, None)
    assert seen == [("http://r:1", ("native",), k) for k in asked]
