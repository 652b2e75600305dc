"""``miles-sc serve-session``: the server as a process."""

import argparse
import asyncio
import ipaddress
import sys

import uvicorn

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient
from miles_sc.rollout.probe import probe_chat, raise_on_failure
from miles_sc.rollout.probe.server import ask_server
from miles_sc.rollout.session.app import SessionServer, create_app
from miles_sc.rollout.session.continuation import PromptContinuation
from miles_sc.rollout.session.exchange import Recorder
from miles_sc.rollout.session.limits import add_limit_arguments, limits_from_args
from miles_sc.rollout.session.relay import Relay

_GRACE_SECONDS = 5
# longer than clients keep idle connections (OpenAI's: 5 s): one that is closed here first would fail under their next call
_KEEP_ALIVE_SECONDS = 75


def add_serve_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``miles-sc serve-session``."""
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    server.add_argument("--port", type=int, default=8500, help="0 takes a free one (default: %(default)s)")
    server.add_argument("--api-key", metavar="KEY", help="bearer token that clients must present (default: none)")
    _add_engine(parser.add_argument_group("engine"))
    _add_sampler(parser.add_argument_group("sampler, as the run trains on it"))
    add_limit_arguments(parser.add_argument_group("limits"))


def serve_session(args: argparse.Namespace) -> int:
    """Serves until a signal stops it, which then takes its usual effect: KeyboardInterrupt after Ctrl-C.

    Raises:
        ValueError: flags that do not go together, or an engine that does not answer.
    """
    config = ScoreCenteringConfig.from_args(args)
    limits = limits_from_args(args)
    vocab_size = asyncio.run(_examined_vocabulary(args, config))
    warn_of_exposure(args)
    if not config.top_logprobs_num:
        print(
            "miles-sc: warning: no candidates are recorded for score centering; set --rollout-top-logprobs-num", file=sys.stderr
        )
    engine = EngineClient(args.engine_url, _client_settings(args), api_key=args.engine_api_key)
    relay = Relay(engine.url, timeout=args.engine_timeout, connections=args.engine_connections, api_key=args.engine_api_key)
    recorder = Recorder(engine, config, vocab_size, _continuation(args.tokenizer))
    server = SessionServer(recorder, relay, limits, api_key=args.api_key)
    _Uvicorn(server, host=args.host, port=args.port).run()
    return 0


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engine-url", required=True, metavar="URL", help="SGLang server, or a router before several")
    add("--engine-api-key", metavar="KEY", help="bearer token that the engine wants")
    add("--engine-timeout", type=float, default=600.0, metavar="S", help="seconds for one answer (default: %(default)s)")
    add("--engine-connections", type=int, default=256, metavar="N", help="calls under way at once (default: %(default)s)")
    add(
        "--tokenizer", metavar="DIR",
        help="the engine's tokenizer: histories go on with the tokens that were sampled, never with their text tokenised anew",
    )  # fmt: skip
    add("--vocab-size", type=int, metavar="N", help="the model's (default: from the engine's model directory, if it is here)")


def _add_sampler(group: argparse._ArgumentGroup) -> None:
    add, sampler = group.add_argument, ScoreCenteringConfig()
    add(
        "--rollout-top-logprobs-num", type=int, default=0, metavar="K",
        help="candidates recorded per generated token; 0 is off (default: %(default)s)",
    )  # fmt: skip
    for name, kind, metavar, text in (
        ("temperature", float, "T", "sampler's temperature"),
        ("top_p", float, "P", "nucleus of the sampler; 1 is unfiltered"),
        ("top_k", int, "N", "top-k of the sampler; -1 is unfiltered"),
    ):
        flag = f"--rollout-{name.replace('_', '-')}"
        add(flag, type=kind, default=getattr(sampler, name), metavar=metavar, help=f"{text} (default: %(default)s)")


def _client_settings(args: argparse.Namespace) -> ClientSettings:
    return ClientSettings(request_timeout=args.engine_timeout, max_connections=args.engine_connections)


async def _examined_vocabulary(args: argparse.Namespace, config: ScoreCenteringConfig) -> int | None:
    """The engine's vocabulary, which bounds K, after the engine has shown that it delivers what a recorded turn needs."""
    engine = EngineClient(args.engine_url, _client_settings(args), api_key=args.engine_api_key)
    try:
        server = await ask_server(engine.get)
        vocab_size = args.vocab_size or server.vocabulary
        if not config.top_logprobs_num:
            return vocab_size
        if vocab_size is None:
            raise ValueError(
                f"the engine's model ({' or '.join(server.model_paths)}) is not found on this machine by an absolute path, "
                "and its vocabulary bounds the candidates that may be asked for: set --vocab-size"
            )
        config.check_vocabulary(vocab_size)
        raise_on_failure(await probe_chat(engine.post, config, model=server.model or "default", vocab_size=vocab_size))
        return vocab_size
    finally:
        await engine.close()


def _continuation(directory: str | None) -> PromptContinuation | None:
    if directory is None:
        return None
    from transformers import AutoTokenizer

    return PromptContinuation(AutoTokenizer.from_pretrained(directory))


def warn_of_exposure(args: argparse.Namespace) -> None:
    if _is_loopback(args.host):
        return
    who = "whoever has the key" if args.api_key else "anybody who reaches this machine (set --api-key)"
    print(f"miles-sc: warning: --host {args.host} is open to the network: {who} can sample and read sessions", file=sys.stderr)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Uvicorn(uvicorn.Server):
    """Says where it listens; ends the sessions first when it is stopped, so that no call is waited for."""

    def __init__(self, server: SessionServer, *, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(server),
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._sessions = server.sessions

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        for listener in self.servers:
            for socket in listener.sockets:
                host, port = socket.getsockname()[:2]
                print(f"session server: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list | None = None) -> None:
        self._sessions.end_all("the server stops")
        await super().shutdown(sockets)
