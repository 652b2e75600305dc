"""Weights that are made to differ before an engine gets them, and the GPUs that servers get."""

import asyncio

import pytest
import torch

from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.trainer.cluster import _gpu_shares
from miles_sc.trainer.engines import MismatchedEngine


class Recorder:
    def __init__(self):
        self.updates = []

    async def update_weights(self, state, version):
        self.updates.append(({name: value.clone() for name, value in state.items()}, version))


@pytest.mark.parametrize("kind", ["int4", "int8", "noise:0.1"])
def test_every_update_is_changed_alike_and_the_trainers_weights_are_not(model, kind):
    trained = {name: value.numpy().copy() for name, value in load_causal_lm(str(model)).state_dict().items()}
    before = {name: value.copy() for name, value in trained.items()}
    sampler = load_causal_lm(str(model))
    expected = load_causal_lm(str(model))
    mismatch = parse_mismatch(kind, seed=3)
    mismatch.remember(expected)
    mismatch.apply(expected)
    recorder = Recorder()

    async def update_twice():
        engine = MismatchedEngine(recorder, sampler, parse_mismatch(kind, seed=3))
        for version in ("1", "2"):
            await engine.update_weights(trained, version)

    asyncio.run(update_twice())
    assert [version for _, version in recorder.updates] == ["1", "2"]
    for state, _ in recorder.updates:
        assert state.keys() == trained.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=0)
    assert any((state[name].numpy() != before[name]).any() for name in before)
    assert all((trained[name] == before[name]).all() for name in before)


@pytest.mark.parametrize(
    ("gpus", "world_size", "engine_gpus", "shares"),
    [(0, 2, 4, (0.0, 0.0)), (1, 1, 0, (0.6, 0.4)), (2, 1, 0, (1.0, 1.0)), (8, 4, 4, (1.0, 4.0)), (3, 2, 1, (1.0, 1.0))],
)
def test_launched_servers_get_gpus_of_their_own(monkeypatch, gpus, world_size, engine_gpus, shares):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _gpu_shares(world_size, engine_gpus) == shares


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    message = (
        "--actor-num-gpus-per-node 2 and 4 of --rollout-num-engines x --rollout-num-gpus-per-engine: this machine has 4 GPUs"
    )
    with pytest.raises(ValueError, match=message):
        _gpu_shares(2, 4)
