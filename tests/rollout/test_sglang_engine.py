"""The engine on servers that are no SGLang: what it refuses, and how it gets over faults. Real servers: tests/live."""

import asyncio
import json
import os
import signal

import httpx
import numpy as np
import pytest
from safetensors import SafetensorError

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineError
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.server import ServerFailed
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.generate import all_or_none
from tests.processes import LINUX, MARK, marked, server_pids
from tests.rollout.fakes import behaviour, fake_python

SELECTED = ScoreCenteringConfig(top_logprobs_num=8)
SUPPORT = ScoreCenteringConfig(top_logprobs_num=32, top_k=16)
WEIGHTS = {"weight": np.ones(3, np.float32)}
REQUEST = {"input_ids": [1]}
CLIENT = ClientSettings(attempts=1)


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """``drive(work, **behaviour) -> work(engine)`` with servers launched for it; none may be left afterwards."""
    mark, model = str(tmp_path), tmp_path / "model"
    monkeypatch.setenv(MARK, mark)
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 64}))

    def drive(work, *, config=SELECTED, settings=(), **options):
        async def run():
            launched = {"python": fake_python(tmp_path), "environment": behaviour(count=f"{mark}/count", **options)}
            made = SglangSettings(**{"client": CLIENT, "stop_timeout": 1.0, **launched, **dict(settings)})
            engine = await SglangEngine.start(made, model_path=model, config=config, log_dir=tmp_path / "logs")
            try:
                return await work(engine)
            finally:
                await engine.close()
                await engine.close()

        try:
            return asyncio.run(run())
        finally:
            assert marked(mark) == {}

    return drive


async def nothing(engine):
    pass


async def generated(engine, **options):
    """The port of the server that answered."""
    return await engine.generate(REQUEST, lambda answer: answer["output_ids"][0])


async def behave(engine, **options):
    async with httpx.AsyncClient() as client:
        (await client.post(f"http://127.0.0.1:{await generated(engine)}/behave", json=options)).raise_for_status()


# --- what it refuses


@pytest.mark.parametrize(
    ("info", "config", "way", "message"),
    [
        ({"allow_auto_truncate": True}, SELECTED, "disk", "cuts long prompts in silence .*without --allow-auto-truncate"),
        ({"speculative_algorithm": "EAGLE"}, SELECTED, "disk", r"decodes speculatively \(EAGLE\); start it without"),
        ({"sampling_mask_max_tokens": 15}, SUPPORT, "disk", "supports of at most 15 .*--sampling-mask-max-tokens 32, or lower"),
        ({"dp_size": 2}, SELECTED, "tensor", "has 2 replicas and 1 pipeline stages, .*set update_weights_by to disk"),
        ({"pp_size": 2}, SELECTED, "distributed", "has 1 replicas and 2 pipeline stages"),
        (
            {"internal_states": [{"env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "Yes"}}]},
            SELECTED,
            "disk",
            r"from before the temperature \(SGLANG_RETURN_ORIGINAL_LOGPROB = Yes\)",
        ),
    ],
)
def test_servers_that_cannot_be_trained_with_are_refused(drive, info, config, way, message):
    with pytest.raises(ValueError, match=f"SGLang server http://127.0.0.1:[0-9]+ .*{message}"):
        drive(nothing, config=config, settings={"update_weights_by": way}, info=info)


@pytest.mark.parametrize(
    "info",
    [
        {"sampling_mask_max_tokens": 16, "dp_size": 2, "speculative_algorithm": None},
        {"internal_states": [{"env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}}, {}]},
    ],
)
def test_servers_that_can_are_not(drive, info):
    drive(nothing, config=SUPPORT, info=info)


def test_more_candidates_than_the_vocabulary_are_refused_before_anything_starts(drive):
    with pytest.raises(ValueError, match="--rollout-top-logprobs-num 65 exceeds the model's vocabulary of 64"):
        drive(nothing, config=ScoreCenteringConfig(top_logprobs_num=65), settings={"python": "/none"})


def test_a_server_that_is_not_there_is_named(drive):
    with pytest.raises(EngineError, match="http://127.0.0.1:9/server_info"):
        drive(nothing, settings={"external_addresses": ("127.0.0.1:9",), "environment": {}})


@pytest.mark.parametrize("version", ["", "default"])
def test_names_that_tell_no_weights_apart_are_refused(drive, version):
    async def work(engine):
        with pytest.raises(ValueError, match=f"weight version '{version}': give it a name"):
            await engine.update_weights(WEIGHTS, version)
        await generated(engine)

    drive(work)


@LINUX
def test_when_one_server_does_not_start_the_others_are_stopped(drive):
    with pytest.raises(ServerFailed, match="SGLang server [01] ended with exit code 1"):
        drive(nothing, settings={"num_engines": 2}, exit="out of luck", exits=1)


# --- calls


def test_calls_go_to_the_least_busy_server(drive):
    async def work(engine):
        return await all_or_none(generated(engine) for _ in range(6))

    ports = drive(work, settings={"num_engines": 2})
    assert sorted(ports.count(port) for port in set(ports)) == [3, 3]


def test_what_the_reader_raises_comes_out_and_nothing_is_repeated(drive):
    async def work(engine):
        seen = []

        def read(answer):
            seen.append(answer)
            raise ValueError("not this one")

        with pytest.raises(ValueError, match="not this one"):
            await engine.generate(REQUEST, read)
        return seen

    assert len(drive(work)) == 1


def test_an_answer_by_unknown_weights_is_never_read(drive):
    async def work(engine):
        with pytest.raises(EngineError, match="sampled by weight version 'theirs', expected 'default'; no weights were sent yet"):
            await engine.generate(REQUEST, pytest.fail)
        await engine.update_weights(WEIGHTS, "1")
        with pytest.raises(
            EngineError, match="in 4 attempts.* sampled by weight version 'theirs', expected '1'; does somebody else"
        ):
            await engine.generate(REQUEST, pytest.fail)

    drive(work, answers="theirs")


def test_older_weights_are_as_wrong_as_unknown_ones(drive):
    async def work(engine):
        await engine.update_weights(WEIGHTS, "1")
        await behave(engine, answers="1")
        assert await generated(engine)
        await engine.update_weights(WEIGHTS, "2")
        with pytest.raises(EngineError, match="sampled by weight version '1', expected '2'"):
            await generated(engine)

    drive(work)


# --- updates


def test_after_an_update_that_failed_calls_are_refused_until_one_succeeds(drive):
    async def work(engine):
        await engine.update_weights(WEIGHTS, "1")
        await behave(engine, refuse=["/update_weights_from_disk"])
        server = await generated(engine)
        with pytest.raises(EngineError, match="update_weights_from_disk.*as the test asks for"):
            await engine.update_weights(WEIGHTS, "2")
        with pytest.raises(EngineError, match="the update to weight version '2' failed on .*update again"):
            await generated(engine)
        async with httpx.AsyncClient() as client:
            await client.post(f"http://127.0.0.1:{server}/behave", json={"refuse": []})
        await engine.update_weights(WEIGHTS, "3")
        assert await generated(engine) == server

    drive(work)


def test_a_server_that_is_brought_back_does_not_clear_another(drive):
    """One refuses an update, the other dies in it and comes back with the weights of before: the first may hold a mixture."""

    async def work(engine):
        await engine.update_weights(WEIGHTS, "1")
        refusing, dying = (server.address for server in engine._servers)
        async with httpx.AsyncClient() as client:
            await client.post(f"{refusing}/behave", json={"refuse": ["/update_weights_from_disk"]})
            await client.post(f"{dying}/behave", json={"deadly": ["/update_weights_from_disk"]})
            with pytest.raises(EngineError):
                await engine.update_weights(WEIGHTS, "2")
            await asyncio.sleep(1.0)  # for the supervisor to see that one has ended
            async with engine._lock:
                await engine._start_ended()
            with pytest.raises(EngineError, match=f"weight version '2' failed on {refusing}, which may hold a mixture"):
                await generated(engine)
            await client.post(f"{refusing}/behave", json={"refuse": []})
        await engine.update_weights(WEIGHTS, "3")
        assert await generated(engine)

    drive(work, settings={"num_engines": 2})


def test_an_update_that_is_cancelled_leaves_no_checkpoint(drive, tmp_path):
    weights = {"weight": np.ones(1 << 24, np.float32)}  # takes a while to write

    async def work(engine):
        await engine.update_weights(WEIGHTS, "1")
        before = list((tmp_path / "logs").glob("weights-*"))
        update = asyncio.create_task(engine.update_weights(weights, "2"))
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert list((tmp_path / "logs").glob("weights-*")) == before
        assert await generated(engine)

    drive(work)


def test_weights_that_cannot_be_written_name_the_folder(drive, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("miles_sc.rollout.engines.sglang.weights.save_file", full)

    async def work(engine):
        with pytest.raises(ValueError, match="logs/weights-.*cannot be written .No space left on device.; make room there"):
            await engine.update_weights(WEIGHTS, "1")
        assert not list((tmp_path / "logs").glob("weights-*"))

    drive(work)


def test_every_way_that_a_generation_may_go_can_be_asked(drive):
    async def work(engine):
        assert list(engine.routes) == [server.address for server in engine._servers]
        answers = [await ask("/generate", REQUEST) for ask in engine.routes.values()]
        assert [f"http://127.0.0.1:{answer['output_ids'][0]}" for answer in answers] == list(engine.routes)

    drive(work, settings={"num_engines": 2})


@pytest.mark.parametrize("answer", [{}, {"error": "overloaded"}, {"meta_info": None}])
def test_an_answer_that_is_none_is_told(drive, answer):
    async def work(engine):
        await behave(engine, instead=answer)
        with pytest.raises(ValueError, match="the answer holds no meta_info"):
            await generated(engine)

    drive(work)


def test_a_server_that_did_not_take_the_weights_is_named(drive):
    async def work(engine):
        with pytest.raises(EngineError, match="reports weight version 'default' after an update to '1'"):
            await engine.update_weights(WEIGHTS, "1")

    drive(work, keeps=True)


def test_only_the_newest_checkpoint_stays_on_disk(drive, tmp_path):
    async def work(engine):
        for version in "123":
            await engine.update_weights(WEIGHTS, version)
            (folder,) = (tmp_path / "logs").glob("weights-*")
            assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model-00001.safetensors"]

    drive(work)
    assert not list((tmp_path / "logs").glob("weights-*"))


# --- servers that end


@LINUX
def test_a_server_that_ended_is_started_again_with_the_newest_weights(drive, tmp_path, caplog):
    async def work(engine):
        await engine.update_weights(WEIGHTS, "1")
        (before,) = server_pids(str(tmp_path))
        os.kill(before, signal.SIGKILL)
        # both calls meet the dead server, and it is started once
        ports = await all_or_none(generated(engine) for _ in range(2))
        (after,) = server_pids(str(tmp_path))
        os.kill(after, signal.SIGKILL)
        await asyncio.sleep(0.5)  # for its supervisor to see it
        await engine.update_weights(WEIGHTS, "2")
        return {*ports, await generated(engine)}, before, after

    ports, before, after = drive(work)
    assert len(ports) == 1 and before != after
    warnings = [record.getMessage() for record in caplog.records if "starting it again" in record.getMessage()]
    assert len(warnings) == 2 and "SGLang server 0 ended with exit code 137; starting it again\n-- command: " in warnings[0]


@LINUX
def test_a_server_that_ends_again_and_again_is_given_up(drive, tmp_path):
    async def work(engine):
        with pytest.raises(ServerFailed) as failure:
            await generated(engine)
        return str(failure.value)

    message = drive(work, deadly=["/generate"])
    assert "processes were started again 3 times since the last update" in message
    assert (tmp_path / "logs" / "sglang-0.log").read_text().count("fake SGLang") == 4


def test_external_servers_are_left_running(drive, tmp_path):
    async def outer(engine):
        port = await generated(engine)
        external = SglangSettings(external_addresses=(f"127.0.0.1:{port}",), client=CLIENT)
        other = await SglangEngine.start(external, model_path=tmp_path / "model", config=SELECTED, log_dir=tmp_path / "other")
        assert await generated(other) == port
        await other.close()
        assert await generated(engine) == port

    drive(outer)
