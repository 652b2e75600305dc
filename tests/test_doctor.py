"""The doctor at servers and routers over HTTP: table, JSON, exit status, and who is to blame."""

import argparse
import json
import re

import pytest

from miles_sc.doctor import add_doctor_arguments, doctor
from miles_sc.rollout.engines.sglang.client import EngineError
from tests.rollout import bad_routes as bad

MODEL = ["--rollout-top-logprobs-num", "32", "--vocab-size", str(bad.TRUE_VOCAB)]


@pytest.fixture(scope="module")
def engine():
    return bad.HonestEngine()


@pytest.fixture
def visit(capsys):
    """``visit(*flags) -> (exit status, standard output)``."""

    def visit(*flags):
        parser = argparse.ArgumentParser()
        add_doctor_arguments(parser)
        status = doctor(parser.parse_args([str(flag) for flag in flags]))
        return status, capsys.readouterr().out

    return visit


def verdicts(output):
    """(route, check) -> verdict of everything but ``ok``."""
    findings = json.loads(output)["findings"]
    return {(it["route"], it["check"]): it["verdict"] for it in findings if it["verdict"] != "ok"}


def remedy_of(output, check):
    (finding,) = [it for it in json.loads(output)["findings"] if it["check"] == check]
    return f"{finding['came']} -> {finding['remedy']}"


# --- one server


@pytest.mark.parametrize("width", [80, 130])
def test_the_table_of_an_honest_server(engine, visit, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with bad.served(engine) as url:
        status, output = visit("--endpoint", url, *MODEL)
    lines = output.splitlines()
    assert status == 0 and all(len(line) <= width for line in lines)
    assert lines[0] == f"{url}: an engine; model tiny, vocabulary {bad.TRUE_VOCAB}"
    assert [cell.strip() for cell in lines[1].split("┃")] == ["route", "check", "verdict", "what came, what to do"]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines[3:-1]]
    assert rows[0] == ["server", "version", "ok", "SGLang 0.5.23"]
    assert ["native", "candidates", "ok", "32 of 32 on every token"] in rows
    assert ["chat", "prompt ids", "ok", "3 ids"] in rows
    assert rows[-1] == ["", "support", "not needed", "sampling is unfiltered; see --mode"]
    assert lines[-1] == "Every check holds."


@pytest.mark.parametrize("width", [80, 130])
def test_the_table_of_a_bad_one(engine, visit, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with bad.served(engine, bad.refuses_above_20) as url:
        status, output = visit("--endpoint", url, "--route", "native", "--mode", "both", *MODEL)
    assert status == 1 and all(len(line) <= width for line in output.splitlines())
    text = " ".join(output.replace("│", " ").split())
    assert "32 refused (status 400, top_logprobs: 32 is above 20), 20 accepted" in text
    assert "→ send these calls to the engine itself, or through a layer that passes more than 20" in text
    assert "chat" not in text and text.endswith("1 failed, 0 could not be told.")


@pytest.mark.parametrize(
    ("flags", "routes", "checks"),
    [
        ([], {"native", "chat", "server"}, {"candidates", "form"}),
        (["--route", "native"], {"native", "server"}, {"candidates", "form"}),
        (["--route", "chat", "--rollout-top-k", "16", "--rollout-temperature", "0.8"], {"chat", "server"}, {"support"}),
        (["--mode", "support", "--route", "native"], {"native", "server"}, {"support"}),
        (["--mode", "selected", "--rollout-top-k", "16", "--route", "native"], {"native", "server"}, {"candidates", "form"}),
        (["--mode", "both", "--rollout-top-k", "16", "--rollout-top-p", "0.9"], {"native", "chat", "server"},
         {"candidates", "form", "support"}),
    ],
)  # fmt: skip
def test_what_is_asked_follows_the_flags(engine, visit, flags, routes, checks):
    with bad.served(engine) as url:
        status, output = visit("--endpoint", url, "--json", *MODEL, *flags)
    report = json.loads(output)
    assert status == 0 and report["holds"] is True and report["endpoint"] == url and report["engines"] == {}
    assert {it["route"] for it in report["findings"]} == routes
    assert {it["check"] for it in report["findings"]} & {"candidates", "form", "support"} == checks
    places = [(it["route"], it["check"]) for it in report["findings"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("some", [bad.asks_for_candidates, bad.asks_for_support])
def test_of_what_both_modes_look_at_the_worse_counts(engine, visit, some):
    with bad.served(engine, bad.editing(lambda meta: meta.pop("finish_reason"), of=some)) as url:
        status, output = visit("--endpoint", url, "--json", "--route", "native", "--mode", "both", *MODEL)
    assert status == 1 and verdicts(output)["native", "fields"] == "fails"


def test_the_model_that_chat_asks_for(engine, visit):
    with bad.served(engine) as url:
        for flags, name in (([], "tiny"), (["--model", "other"], "other")):
            del engine.calls[:]
            visit("--endpoint", url, "--route", "chat", *MODEL, *flags)
            assert {call["model"] for call in engine.calls} == {name}


@pytest.mark.parametrize("place", ["--hf-checkpoint", "model_info", "text_config", "tokenizer"])
def test_the_vocabulary_is_read_from_the_models_directory(engine, visit, tmp_path, place):
    vocabulary = {"vocab_size": bad.TRUE_VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": vocabulary} if place == "text_config" else vocabulary))
    flags, about = [], bad.ABOUT | {"/model_info": {"model_path": str(tmp_path)}}
    if place == "tokenizer":  # the weights came from a folder that is gone
        about["/model_info"] = {"model_path": str(tmp_path / "weights-1"), "tokenizer_path": str(tmp_path)}
    if place == "--hf-checkpoint":
        make_tokenizer(tmp_path)
        flags, about = ["--hf-checkpoint", tmp_path], bad.ABOUT
    del engine.calls[:]
    with bad.served(engine, about=about) as url:
        status, output = visit("--endpoint", url, "--json", "--route", "native", *flags)
    assert (status, verdicts(output)) == (0, {})
    assert engine.calls[0]["top_logprobs_num"] == 128
    assert (engine.calls[0]["input_ids"] == [1, 2, 3, 4]) == (place != "--hf-checkpoint")


def test_an_unknown_vocabulary_does_not_pass(engine, visit):
    del engine.calls[:]
    with bad.served(engine) as url:
        status, output = visit("--endpoint", url, "--json")
    assert status == 1 and set(verdicts(output).values()) == {"could not tell"}
    assert max(call.get("top_logprobs_num", call.get("top_logprobs", 0)) for call in engine.calls) == 16


def test_more_than_the_vocabulary_is_refused_without_asking(engine, visit):
    del engine.calls[:]
    with bad.served(engine) as url:
        status, output = visit("--endpoint", url, "--json", "--vocab-size", "100")
    assert status == 1 and engine.calls == []
    assert verdicts(output) == {("native", "candidates"): "fails", ("chat", "candidates"): "fails"}


@pytest.mark.parametrize(
    ("about", "verdict"),
    [
        ({"/server_info": {"version": "0.5.23", "speculative_algorithm": "EAGLE"}}, {("server", "speculative"): "fails"}),
        ({"/server_info": {}}, {("server", "version"): "note"}),
    ],
)
def test_what_a_server_says_of_itself(engine, visit, about, verdict):
    with bad.served(engine, about=bad.ABOUT | about) as url:
        status, output = visit("--endpoint", url, "--json", *MODEL)
    assert verdicts(output) == verdict and status == int("fails" in verdict.values())


# --- servers that do not answer


def fails(status):
    def layer(engine, path, body):
        raise EngineError('{"message": "it broke"}', status)

    return layer


@pytest.mark.parametrize(
    ("layer", "check", "told"),
    [
        (lambda *_: None, "answer", "did the server end"),
        (fails(500), "answer", "status 500, it broke -> see the log of what answers there"),
        (fails(404), "answer", "status 404, it broke -> is this an SGLang server or a router"),
        (lambda *_: b"<html>welcome</html>", "meta_info", "<html>welcome</html>.* -> is this an SGLang server or a router"),
    ],
)
def test_a_server_that_hangs_up_fails_or_sends_a_page(engine, visit, layer, check, told):
    with bad.served(engine, layer) as url:
        status, output = visit("--endpoint", url, "--json", "--route", "native", *MODEL)
    assert status == 1 and verdicts(output)["native", check] == "fails"
    assert re.search(told, remedy_of(output, check))


def test_an_unreachable_endpoint_is_one_clear_line(visit):
    with bad.served(None) as url:
        pass
    with pytest.raises(EngineError, match=f"{url}/v1/models.*connect") as raised:
        visit("--endpoint", url)
    assert "\n" not in str(raised.value)


# --- a router


def a_router_before(*urls):
    workers = [{"url": url, "worker_type": "regular"} for url in urls]
    return {"/v1/models": bad.ABOUT["/v1/models"], "/workers": {"workers": workers}}


@pytest.mark.parametrize("listed", ["workers", "urls", "--engine"])
def test_what_the_router_does_is_not_blamed_on_the_engine(engine, visit, listed):
    with bad.served(engine) as behind:
        about = {
            "workers": a_router_before(behind + "@0", behind + "@1"),
            "urls": bad.ABOUT | {"/list_workers": {"urls": [behind]}},
            "--engine": bad.ABOUT,
        }
        flags = ["--engine", behind] if listed == "--engine" else []
        with bad.served(engine, bad.drops_support, about=about[listed]) as url:
            status, output = visit("--endpoint", url, "--json", "--mode", "support", "--route", "native", *MODEL, *flags)
    report = json.loads(output)
    assert status == 1 and list(report["engines"]) == [behind]
    assert {it["verdict"] for it in report["engines"][behind]} == {"ok"}
    assert "the router drops it, the engine asked directly does not" in remedy_of(output, "support")


@pytest.mark.parametrize(
    ("layer", "check", "does"),
    [(bad.refuses_above_20, "candidates", "refuses"), (bad.asking_for(temperature=1.0), "temperature", "changes")],
)
def test_what_else_a_router_does(engine, visit, layer, check, does):
    with bad.served(engine) as behind, bad.served(engine, layer, about=a_router_before(behind)) as url:
        _, output = visit("--endpoint", url, "--json", "--route", "native", *MODEL)
    assert f"the router {does} it, the engine asked directly does not" in remedy_of(output, check)


def test_what_an_engine_does_is_blamed_on_it(engine, visit, monkeypatch):
    layer = bad.asking_for(temperature=1.0)
    monkeypatch.setenv("COLUMNS", "130")
    with bad.served(engine) as good, bad.served(engine, layer) as behind:
        with bad.served(engine, layer, about=a_router_before(good, behind)) as url:
            status, output = visit("--endpoint", url, "--json", "--route", "native", *MODEL)
            assert status == 1
            assert f"the same log-probs; asked directly it is the same at {behind} -> log-probs lack" in remedy_of(
                output, "temperature"
            )
            _, table = visit("--endpoint", url, "--route", "native", *MODEL)
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines()]
    assert ["engine", "every check", "ok", f"{good}, asked directly"] in rows
    assert ["engine", "native", "fails", f"{behind}: at 0.7, 1, 1.3: the same log-probs"] in rows
    assert table.startswith(f"{url}: a router, 2 engines behind it; model tiny")


def test_a_fault_of_one_engine_alone_counts_though_the_router_has_not_shown_it(engine, visit):
    with bad.served(engine, bad.drops_candidates) as behind, bad.served(engine, about=a_router_before(behind)) as url:
        status, output = visit("--endpoint", url, "--json", "--route", "native", *MODEL)
    assert (status, verdicts(output)) == (1, {})


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "grpc://127.0.0.1:9"])
def test_an_engine_that_cannot_be_reached_from_here_is_a_note(engine, visit, address):
    with bad.served(engine, about=a_router_before(address)) as url:
        status, output = visit("--endpoint", url, "--json", "--route", "native", *MODEL)
    ((finding,),) = json.loads(output)["engines"].values()
    assert status == 0 and (finding["check"], finding["verdict"]) == ("reached", "note")


# --- usage


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "localhost:3"], "--endpoint localhost:3: give http://HOST:PORT"),
        (["--rollout-top-logprobs-num", "0"], "--rollout-top-logprobs-num 0: give at least 1"),
        (["--vocab-size", "0"], "--vocab-size 0: give at least 1"),
        (["--timeout", "0"], "--timeout 0.0: give a number of seconds above 0"),
        (["--rollout-top-p", "0.9"], "--rollout-top-p 0.9 without --rollout-top-k"),
        (["--rollout-temperature", "0"], "--rollout-temperature 0.0: set a finite number above 0"),
        (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint /nowhere: give a directory whose config.json"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, flags, message):
    parser = argparse.ArgumentParser()
    add_doctor_arguments(parser)
    assert doctor(parser.parse_args(["--endpoint", "http://127.0.0.1:9", *flags])) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--endpoint", "http://x", "--vocab-size", "3", "--hf-checkpoint", "d"]])
def test_flags_that_exclude_each_other_are_argparses_affair(capsys, flags):
    parser = argparse.ArgumentParser()
    add_doctor_arguments(parser)
    with pytest.raises(SystemExit, match="^2$"):
        parser.parse_args(flags)


def make_tokenizer(directory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"Say": 11, "something": 12, ".": 13, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(directory)
