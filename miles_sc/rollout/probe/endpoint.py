"""An endpoint, the engines behind it, and which of them is to blame."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient, EngineError
from miles_sc.rollout.probe.finding import Finding, Verdict
from miles_sc.rollout.probe.route import probe_chat, probe_native
from miles_sc.rollout.probe.server import AboutServer, ask_server

_ROUTES = ("server", "native", "chat")
# checks whose failure means that something came, but not what was sent
_CHANGEABLE = ("rows", "numbers", "temperature", "alignment", "values")
_WORST_LAST = (Verdict.OK, Verdict.NOTE, Verdict.UNKNOWN, Verdict.FAILED)


def small_prompt(vocab_size: int | None) -> list[int]:
    """Ids that every vocabulary has."""
    return [token for token in (1, 2, 3, 4) if vocab_size is None or token < vocab_size] or [0]


@dataclass(frozen=True)
class Examination:
    """What is asked.

    Attributes:
        routes: ``native``, ``chat`` or both.
        configs: of the runs that want to use the endpoint.
        client: how patient to be.
        prompt_ids: given the vocabulary's size or None, what to continue on the native route.
        model: name for chat calls; None takes what is served.
        vocab_size: None reads it from the served model's directory, where that is on this machine.
        engine: an address behind the endpoint; None takes what the endpoint lists.
    """

    routes: Sequence[str]
    configs: Sequence[ScoreCenteringConfig]
    client: ClientSettings
    prompt_ids: Callable[[int | None], Sequence[int]] = small_prompt
    model: str | None = None
    vocab_size: int | None = None
    engine: str | None = None


@dataclass(frozen=True)
class EndpointReport:
    """What was found at the endpoint, and at each engine behind it that was asked by itself."""

    server: AboutServer
    vocab_size: int | None
    findings: list[Finding]
    engines: dict[str, list[Finding]]

    @property
    def everything(self) -> list[Finding]:
        return [*self.findings, *(finding for findings in self.engines.values() for finding in findings)]

    @property
    def holds(self) -> bool:
        """Whether every check came out well; one that could not be made did not."""
        return all(finding.verdict in (Verdict.OK, Verdict.NOTE) for finding in self.everything)


async def examine_endpoint(url: str, wanted: Examination) -> EndpointReport:
    """Asks the endpoint, then the engines behind it.

    Raises:
        EngineError: nothing answers at the endpoint.
    """
    client = EngineClient(url, wanted.client)
    try:
        server = await ask_server(client.get)
        if wanted.vocab_size is None:
            wanted = replace(wanted, vocab_size=server.vocabulary)
        findings = await _probe(client, server, wanted)
    finally:
        await client.close()
    behind = server.engines or () if wanted.engine is None else (wanted.engine,)
    asked = await asyncio.gather(*(_engine_findings(address, server, wanted) for address in behind))
    engines = dict(zip(behind, asked, strict=True))
    return EndpointReport(server, wanted.vocab_size, [_with_blame(finding, engines) for finding in findings], engines)


async def _engine_findings(url: str, endpoint: AboutServer, wanted: Examination) -> list[Finding]:
    if not url.startswith(("http://", "https://")):
        return [_unreached(f"{url} does not speak HTTP")]
    client = EngineClient(url, wanted.client)
    try:
        server = await ask_server(client.get)
        return await _probe(client, replace(server, model=server.model or endpoint.model), wanted)
    except EngineError as error:
        return [_unreached(" ".join(str(error).split()))]
    finally:
        await client.close()


def _unreached(came: str) -> Finding:
    remedy = "it was asked through the endpoint alone; run the doctor where the engine can be reached"
    return Finding("reached", "server", Verdict.NOTE, came, remedy)


async def _probe(client: EngineClient, server: AboutServer, wanted: Examination) -> list[Finding]:
    findings, vocab_size = _about(server), wanted.vocab_size
    for config in wanted.configs:
        if "native" in wanted.routes:
            prompt_ids = wanted.prompt_ids(vocab_size)
            findings += await probe_native(client.post, config, vocab_size=vocab_size, prompt_ids=prompt_ids)
        if "chat" in wanted.routes:
            model = wanted.model or server.model or "default"
            findings += await probe_chat(client.post, config, model=model, vocab_size=vocab_size)
    return _worst_of_each(findings)


def _about(server: AboutServer) -> list[Finding]:
    if server.engines is not None:
        return []  # a router; its engines tell for themselves
    if server.version is None:
        remedy = "works, but speculative decoding is noticed in answers alone"
        return [Finding("version", "server", Verdict.NOTE, "nothing about the server itself", remedy)]
    findings = [Finding("version", "server", Verdict.OK, f"SGLang {server.version}")]
    if server.speculative:
        remedy = "start the engine without --speculative-algorithm: it reports other log-probs than it samples from"
        findings.append(Finding("speculative", "server", Verdict.FAILED, server.speculative, remedy))
    return findings


def _worst_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a check: several configs have some checks in common."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        place = finding.route, finding.check
        if place not in worst or _WORST_LAST.index(finding.verdict) > _WORST_LAST.index(worst[place].verdict):
            worst[place] = finding
    return sorted(worst.values(), key=lambda finding: _ROUTES.index(finding.route))


def _with_blame(finding: Finding, engines: Mapping[str, Sequence[Finding]]) -> Finding:
    """Says whether the router or an engine behind it did this, where that can be told."""
    if finding.verdict not in (Verdict.NOTE, Verdict.FAILED):
        return finding
    asked = {url: findings for url, findings in engines.items() if any(other.route == finding.route for other in findings)}
    place = finding.route, finding.check, finding.verdict
    same = [url for url, findings in asked.items() if place in {(it.route, it.check, it.verdict) for it in findings}]
    if same:
        return replace(finding, came=f"{finding.came}; asked directly it is the same at {', '.join(same)}")
    if asked:
        changed = finding.check.split()[-1] in _CHANGEABLE
        does = "refuses" if "refused" in finding.came else "changes" if changed else "drops"
        return replace(finding, came=f"{finding.came}; the router {does} it, the engine asked directly does not")
    return finding
