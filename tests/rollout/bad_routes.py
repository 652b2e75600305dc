"""An honest engine in SGLang's words, native and chat, and layers before it that each break one thing."""

import copy
import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from miles_sc.rollout.engines.native_request import SAMPLING_FIELDS
from miles_sc.rollout.engines.sglang.client import EngineError
from tests.rollout.tiny_model import TRUE_VOCAB, build_engine, build_model

NATIVE, CHAT = "/generate", "/v1/chat/completions"
PROMPT = [5, 6, 7]
TOP, TOKENS = "output_top_logprobs", "output_token_logprobs"
MASK, MASK_LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_FLAT_FLAGS = ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64")
_RECORDING = ("return_sampling_mask", "sampling_logprobs_mode", *_FLAT_FLAGS)


class HonestEngine:
    """Answers what SGLang 0.5.23 would; ``calls`` are the bodies that it was asked."""

    def __init__(self, **model):
        self._engine, self.calls = build_engine(build_model(**model)), []
        self._alone = threading.Lock()

    def __call__(self, path, body):
        self.calls.append(body)
        with self._alone:
            return self._native(body) if path == NATIVE else self._chat(body)

    def _native(self, body):
        try:
            return self._engine.generate([body])[0]
        except ValueError as error:
            raise EngineError(json.dumps({"message": str(error)}), 400) from error

    def _chat(self, body):
        sampling = {name: value for name, value in body.items() if name in SAMPLING_FIELDS}
        native = {"input_ids": PROMPT, "sampling_params": {**sampling, "max_new_tokens": body["max_tokens"]}}
        native |= {name: body[name] for name in _RECORDING if name in body}
        if body.get("logprobs"):
            native |= {"return_logprob": True, "top_logprobs_num": body.get("top_logprobs") or 0}
        answer = self._native(native)
        choice = {"index": 0, "message": {"role": "assistant", "content": "text"}}
        if body.get("return_meta_info"):
            choice["meta_info"] = answer["meta_info"]
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = PROMPT
        return {"choices": [choice]}


ABOUT = {
    "/v1/models": {"data": [{"id": "tiny"}]},
    "/model_info": {"model_path": "/nowhere/tiny"},
    "/server_info": {"version": "0.5.23", "speculative_algorithm": None},
}


def asking(engine, layer=None):
    """The ``ask`` of a probe that goes through ``layer(engine, path, body) -> answer``."""

    async def ask(path, body):
        body = copy.deepcopy(dict(body))
        return engine(path, body) if layer is None else layer(engine, path, body)

    return ask


# --- layers; each is honest but for one thing


def honestly(engine, path, body):
    return engine(path, body)


def dropping(*fields):
    """Does not know these fields of a request."""
    return lambda engine, path, body: engine(path, {name: value for name, value in body.items() if name not in fields})


drops_flat, drops_base64 = dropping(*_FLAT_FLAGS), dropping(_FLAT_FLAGS[1])
drops_support = dropping("return_sampling_mask", "sampling_logprobs_mode")
drops_candidates = dropping("top_logprobs_num", *_FLAT_FLAGS)


def asking_for(**changed):
    """Writes other sampling parameters into a native request that is not greedy."""

    def layer(engine, path, body):
        if body["sampling_params"]["temperature"]:
            body["sampling_params"] |= changed
        return engine(path, body)

    return layer


def at_least_as_hot_as(least):
    def layer(engine, path, body):
        sampling = body["sampling_params"]
        if sampling["temperature"]:
            sampling["temperature"] = max(least, sampling["temperature"])
        return engine(path, body)

    return layer


def editing(edit, *, of=lambda body: True):
    """Passes the request on and lets ``edit(meta_info)`` loose on the nested answer to those that match."""

    def layer(engine, path, body):
        answer = drops_flat(engine, path, body)
        meta = (answer["choices"][0] if path == CHAT else answer).get("meta_info")
        if meta is not None and of(body):
            edit(meta)
        return answer

    return layer


def asks_for_candidates(body):
    return bool(body.get("top_logprobs_num") or body.get("top_logprobs"))


def asks_for_support(body):
    return bool(body.get("return_sampling_mask"))


def recording(body):
    return asks_for_candidates(body) or asks_for_support(body)


def caps_at_20(meta):
    meta[TOP] = [row[:20] for row in meta[TOP]]


def keeps_five(meta):
    meta[TOP] = [row[:5] for row in meta[TOP]]


def merges_by_text(meta):
    meta[TOP] = [list({entry[1] % 25: entry for entry in row}.values()) for row in meta[TOP]]


def shifts_everything(meta):
    for field in (TOP, TOKENS):
        meta[field] = meta[field][1:] + meta[field][:1]


def drops_a_row(meta):
    del meta[TOP][-1]


def cuts_tokens_too(meta):
    for field in (TOP, TOKENS):
        del meta[field][-1]


def writes_null(meta):
    meta[TOP][0][3][0] = None


def repeats_an_id(meta):
    meta[TOP][0][3][1] = meta[TOP][0][2][1]


def adds_a_tie(meta):
    for ids, values in zip(meta[MASK], meta[MASK_LOG_PROBS], strict=True):
        ids.append(next(token for token in range(TRUE_VOCAB) if token not in ids))
        values.append(min(values))
        log_mass = math.log(sum(math.exp(value) for value in values))
        values[:] = [value - log_mass for value in values]


def refuses_above_20(engine, path, body):
    asked = body.get("top_logprobs", body.get("top_logprobs_num", 0))
    if asked > 20:
        raise EngineError(f'answered 400: {{"error":{{"message":"top_logprobs: {asked} is above 20"}}}}', 400)
    return engine(path, body)


def refuses_recording(engine, path, body):
    if recording(body):
        raise EngineError('{"message": "no log-probs here"}', 422)
    return engine(path, body)


def refuses_candidates(engine, path, body):
    if asks_for_candidates(body):
        raise EngineError('{"message": "no candidates here"}', 400)
    return engine(path, body)


def refuses_greedy(engine, path, body):
    sampling = body if path == CHAT else body["sampling_params"]
    if sampling["temperature"] == 0:
        raise EngineError('{"message": "temperature must be positive"}', 422)
    return engine(path, body)


def another_prompt_for_masks(engine, path, body):
    if body.get("return_sampling_mask"):
        body["input_ids"] = [8, 9]
    return engine(path, body)


def adds_candidates(engine, path, body):
    return engine(path, body if recording(body) else {**body, "return_logprob": True, "top_logprobs_num": 3})


# --- over HTTP


@contextmanager
def served(engine, layer=None, about=ABOUT):
    """The address of a server on this machine. A layer may return bytes (sent as they are, as HTML) or None (hangs up)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path in about:
                self._send(200, json.dumps(about[self.path]).encode())
            else:
                self._send(404, b'{"detail":"Not Found"}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                answer = engine(self.path, body) if layer is None else layer(engine, self.path, body)
            except EngineError as error:
                return self._send(error.status, str(error).encode())
            if isinstance(answer, bytes):
                return self._send(200, answer, "text/html")
            if answer is None:
                return self.connection.close()
            return self._send(200, json.dumps(answer).encode())

        def _send(self, status, content, kind="application/json"):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
