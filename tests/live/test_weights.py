"""New weights for a real SGLang server, by every way, between and during generations."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
import transformers

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.generate import all_or_none, generate_response
from miles_sc.rollout.sample import Sample
from tests.live import reference
from tests.live.conftest import launched_server, slow_down

TOLERANCE = 1e-4
WAYS = ("disk", "distributed", "tensor")
CONFIG = ScoreCenteringConfig(top_logprobs_num=16, temperature=1.3)
LONG = 900  # tokens; no test waits for them


@pytest.fixture(scope="module")
def endless(model, tmp_path_factory):
    """A model with a tied output layer that never ends a text."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(model)
    config.tie_word_embeddings, config.eos_token_id = True, None
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def private(sglang_python, endless, tmp_path_factory):
    """A server whose weights the tests of this file change."""
    with launched_server(sglang_python, endless, tmp_path_factory.mktemp("private")) as launched:
        yield launched


@pytest.fixture
def drive(private, tmp_path):
    """``drive(work, way) -> work(engine)``, with an engine of its own on the private server."""

    def drive(work, way="disk"):
        async def run():
            settings = SglangSettings(external_addresses=(private.url,), update_weights_by=way)
            engine = await SglangEngine.start(settings, model_path=private.model, config=CONFIG, log_dir=tmp_path)
            try:
                return await work(engine)
            finally:
                await engine.close()

        return asyncio.run(run())

    return drive


def arrays(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def samples(count=3):
    return [Sample(tokens=[40 + i, 50, 60], index=i) for i in range(count)]


async def respond(engine, model, wanted, tokens=8):
    settings = reference.settings(CONFIG, model, tokens=tokens)
    await all_or_none(generate_response(engine, sample, settings, sampling_seed=sample.index) for sample in wanted)


@pytest.mark.parametrize("way", WAYS)
def test_the_served_distribution_becomes_that_of_the_new_weights(drive, private, way):
    models = [reference.load(private.model, noise_seed=seed) for seed in (1, 2)]
    wanted = samples(6)

    async def work(engine):
        for number, model in enumerate(models):
            await engine.update_weights(arrays(model), f"{way} {number}")
            await respond(engine, model, wanted[number * 3 : number * 3 + 3])

    drive(work, way)
    for place, sample in enumerate(wanted):
        assert set(sample.weight_versions) == {f"{way} {place // 3}"}
        assert reference.largest_error(sample, models[place // 3], CONFIG.temperature) < TOLERANCE
        assert reference.largest_error(sample, models[1 - place // 3], CONFIG.temperature) > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_weights_without_the_tied_layer(drive, private, way):
    model, wanted = reference.load(private.model, noise_seed=3), samples()
    state = {name: value.bfloat16() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)

    async def work(engine):
        await engine.update_weights(state, f"{way} in bfloat16")
        await respond(engine, model, wanted)

    drive(work, way)
    assert max(reference.largest_error(sample, model, CONFIG.temperature) for sample in wanted) < TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_calls_under_way_go_on_under_the_new_weights(drive, private, way):
    before, after = (reference.load(private.model, noise_seed=seed) for seed in (4, 5))
    wanted = samples()

    async def work(engine):
        await engine.update_weights(arrays(before), f"{way} before")
        calls = asyncio.ensure_future(respond(engine, before, wanted, tokens=200))
        async with slowed_down(private):
            await asyncio.sleep(1.0)
            await engine.update_weights(arrays(after), f"{way} after")
        await calls

    drive(work, way)
    for sample in wanted:
        split = sample.weight_versions.index(f"{way} after")
        assert sample.weight_versions == [f"{way} before"] * split + [f"{way} after"] * (200 - split) and split > 0
        assert reference.largest_error(sample, before, CONFIG.temperature, range(split)) < TOLERANCE
        assert reference.largest_error(sample, after, CONFIG.temperature, range(split, 200)) < TOLERANCE


async def settled(calls):
    """The calls have returned; what follows them needs some turns of the loop, and no time."""
    for _ in range(1000):
        if calls.done():
            return await calls
        await asyncio.sleep(0)
    raise AssertionError("a call went on after the abort")


def test_an_aborted_response_is_continued_by_new_weights(drive, private):
    before, after = (reference.load(private.model, noise_seed=seed) for seed in (6, 7))
    wanted = samples()

    async def work(engine):
        await engine.update_weights(arrays(before), "before")
        async with slowed_down(private):
            calls = asyncio.ensure_future(respond(engine, before, wanted, tokens=LONG))
            await asyncio.sleep(1.0)
            await engine.abort()
            await settled(calls)
        cut = [sample.response_length for sample in wanted]
        assert all(sample.aborted and 0 < sample.response_length < LONG for sample in wanted)
        await engine.update_weights(arrays(after), "after")
        await respond(engine, after, wanted, tokens=max(cut) + 8)
        return cut

    for sample, cut in zip(wanted, drive(work), strict=True):
        assert not sample.aborted and sample.response_length > cut
        assert sample.weight_versions == ["before"] * cut + ["after"] * (sample.response_length - cut)
        assert reference.largest_error(sample, before, CONFIG.temperature, range(cut)) < TOLERANCE
        assert reference.largest_error(sample, after, CONFIG.temperature, range(cut, sample.response_length)) < TOLERANCE


def test_an_abort_ends_calls_that_still_wait_for_a_connection(drive, private):
    wanted = samples(ClientSettings().max_connections + 30)

    async def work(engine):
        calls = asyncio.ensure_future(respond(engine, reference.load(private.model), wanted, tokens=LONG))
        await asyncio.sleep(0.2)
        await engine.abort()
        await settled(calls)

    drive(work)
    assert all(sample.aborted and sample.response_length < LONG for sample in wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_lost_its_weights_is_given_them_again(drive, private, way, caplog):
    model, wanted = reference.load(private.model, noise_seed=8), samples()

    async def work(engine):
        await engine.update_weights(arrays(model), f"{way} newest")
        await as_if_restarted(private)
        await respond(engine, model, wanted)

    drive(work, way)
    assert all(set(sample.weight_versions) == {f"{way} newest"} for sample in wanted)
    assert max(reference.largest_error(sample, model, CONFIG.temperature) for sample in wanted) < TOLERANCE
    (warning,) = [record.getMessage() for record in caplog.records if "sending version" in record.getMessage()]
    assert private.url in warning and "'default'" in warning and f"{way} newest" in warning


@pytest.mark.parametrize("way", ("distributed", "tensor"))
def test_an_update_that_another_trainer_has_left_half_way_is_no_hindrance(drive, private, way):
    model, wanted = reference.load(private.model, noise_seed=10), samples()

    async def work(engine):
        await tell(private, "/pause_generation", mode="retract")
        await tell(private, "/begin_weight_update")
        await engine.update_weights(arrays(model), f"{way} after all")
        await respond(engine, model, wanted)

    drive(work, way)
    assert max(reference.largest_error(sample, model, CONFIG.temperature) for sample in wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "missing model.norm.weight, unexpected none"),
        (lambda state: state.update(other=state["model.norm.weight"]), "missing none, unexpected other"),
        (
            lambda state: state.update({"model.norm.weight": state["model.norm.weight"][1:]}),
            r"model.norm.weight has shape \[31\]",
        ),
        (lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}), "are tied in .* and differ"),
    ],
    ids=["missing", "unexpected", "shape", "tied"],
)
def test_weights_that_do_not_fit_change_nothing(drive, private, change, message):
    model, wanted = reference.load(private.model, noise_seed=9), samples(1)
    state = arrays(model)
    change(state)

    async def work(engine):
        await engine.update_weights(arrays(model), "fits")
        with pytest.raises(ValueError, match=message):
            await engine.update_weights(state, "does not")
        await respond(engine, model, wanted)

    drive(work)
    assert set(wanted[0].weight_versions) == {"fits"}


@asynccontextmanager
async def slowed_down(launched):
    """A server that takes its time for every token."""
    await slow_down(launched.url, seconds=0.02)
    yield
    await slow_down(launched.url, seconds=None)


async def as_if_restarted(launched):
    """The server's first weights, under their name."""
    await tell(launched, "/update_weights_from_disk", model_path=str(launched.model), weight_version="default")


async def tell(launched, path, **body):
    async with httpx.AsyncClient(base_url=launched.url) as client:
        (await client.post(path, json=body)).raise_for_status()
