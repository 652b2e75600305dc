"""Samples on the wire: exact both ways, and every way to damage a body."""

import dataclasses
import struct
import subprocess
import sys

import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from miles_sc.rollout.sample import Sample
from miles_sc.rollout.session import decode_samples, encode_samples
from miles_sc.rollout.session.assemble import assemble_samples
from miles_sc.rollout.session.wire import META
from tests.rollout.session.chat_engine import EOS, encode
from tests.rollout.session.turns import K, turn
from tests.samples import state

KINDS = {"selected": ("selected", K), "support": ("support", K), "off": ("selected", 0)}


def recorded(kind="selected", **fields):
    """Two turns with an observation between."""
    mode, k = KINDS[kind]
    turns = [turn("u", "xy", mode=mode, k=k), turn([*encode("uxy"), EOS, *encode("v")], "z", 1, mode=mode, k=k, version="8")]
    (sample,) = assemble_samples(turns)
    return dataclasses.replace(sample, **fields)


def empty(kind="selected"):
    """No token was generated."""
    mode, k = KINDS[kind]
    return assemble_samples([turn("u", "", finish="abort", mode=mode, k=k)])[0]


def states(samples):
    return [state(sample) for sample in samples]


# --- both ways


@pytest.mark.parametrize("kind", KINDS)
def test_samples_come_back_as_they_were(kind):
    samples = [
        recorded(kind),
        empty(kind),
        recorded(kind, reward=0.1, index=3, group_index=1, response="so, ünï", truncated=True),
        recorded(kind, reward=-1, weight_versions=None),
        Sample(tokens=[5]),
    ]
    decoded = decode_samples(encode_samples(samples))
    assert states(decoded) == states(samples)
    for sample in decoded:
        sample.check_rows()


def test_no_samples_come_back_as_none():
    assert decode_samples(encode_samples([])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_are_the_fields(kind):
    keys = set(load(encode_samples([recorded(kind), recorded(kind)])))
    candidates = {"rollout_topk_token_ids", "rollout_topk_log_probs"} if kind != "off" else set()
    support = {"rollout_sampling_mask.ids", "rollout_sampling_mask.offsets"} if kind == "support" else set()
    fields = {"tokens", "loss_mask", "rollout_log_probs"} | candidates | support
    assert keys == {f"{field}.{place}" for field in fields for place in (0, 1)} | {META}


def test_without_recording_a_body_is_what_it_would_be_without_candidates():
    plain = dataclasses.replace(recorded(), rollout_topk_token_ids=None, rollout_topk_log_probs=None)
    assert encode_samples([recorded("off")]) == encode_samples([plain])
    assert b"topk" not in encode_samples([plain]) and b"mask.ids" not in encode_samples([plain])


def test_every_field_of_a_sample_travels():
    decoded = decode_samples(encode_samples([recorded("support", reward=1.0)]))[0]
    unset = {field.name for field in dataclasses.fields(Sample) if getattr(decoded, field.name) is None}
    assert not unset and len(dataclasses.fields(Sample)) == 15  # a new field needs a place on the wire


def test_views_and_read_only_arrays_are_encoded():
    sample, wide = recorded(), np.repeat(recorded().rollout_topk_token_ids, 2, axis=1)
    wide.flags.writeable = False
    view = dataclasses.replace(sample, rollout_topk_token_ids=wide[:, ::2])
    assert states(decode_samples(encode_samples([view]))) == states([sample])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": float("nan")}, "sample 1: reward = nan: give a finite number"),
        ({"reward": "good"}, "sample 1: reward = 'good': give a finite number"),
        ({"index": 1.5}, "sample 1: index = 1.5: give a whole number"),
        ({"truncated": 1}, "sample 1: truncated = 1: give true or false"),
        ({"response": None}, "sample 1: response = None: give text"),
        ({"response": "\ud800"}, "cannot be written as JSON"),
        ({"tokens": [2**31]}, "sample 1: tokens does not fit int32"),
        ({"tokens": [0.5]}, "sample 1: tokens does not fit int32"),
        ({"loss_mask": [None]}, "sample 1: loss_mask does not fit int8"),
        ({"loss_mask": [[1]]}, "sample 1: loss_mask does not fit int8"),
        ({"rollout_log_probs": ["x"]}, "sample 1: rollout_log_probs does not fit float64"),
        ({"rollout_topk_log_probs": np.zeros((1, K))}, "sample 1: rollout_topk_log_probs is float64: give a numpy float32"),
        ({"rollout_topk_token_ids": [[1]]}, "sample 1: rollout_topk_token_ids is list: give a numpy int32"),
    ],
)
def test_what_would_not_come_back_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        encode_samples([recorded(), recorded(**fields)])


def test_reading_a_body_needs_no_web_framework():
    code = (
        "import sys, miles_sc.rollout.session; print([name for name in sys.modules if name in ('fastapi', 'uvicorn', 'httpx')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- damaged bodies


def damaged(change=None, meta=None, kind="support"):
    """The body of one sample after changes to its tensors and to its fields."""
    tensors = dict(load(encode_samples([recorded(kind)])))
    if meta:
        document = orjson.loads(tensors[META].tobytes())
        meta(document)
        tensors[META] = np.frombuffer(orjson.dumps(document), np.uint8)
    if change:
        change(tensors)
    return save(tensors)


def _replace(name, build):
    return lambda tensors: tensors.__setitem__(name, np.ascontiguousarray(build(tensors[name])))


IDS, LOG_PROBS = "rollout_topk_token_ids.0", "rollout_topk_log_probs.0"
SUPPORT, OFFSETS = "rollout_sampling_mask.ids.0", "rollout_sampling_mask.offsets.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[
            (_replace(name, lambda array, dtype=dtype: array.astype(dtype)), f"{name[:-2]} came as {np.dtype(dtype).name}")
            for name, dtype in [
                ("tokens.0", np.int64), ("loss_mask.0", np.int32), ("rollout_log_probs.0", np.float32), (IDS, np.int64),
                (LOG_PROBS, np.float64), (LOG_PROBS, np.float16), (SUPPORT, np.int64), (OFFSETS, np.int32),
            ]
        ],
        *[
            (lambda tensors, name=name: tensors.pop(name), f"the tensor {name} is missing")
            for name in ("tokens.0", "loss_mask.0", "rollout_log_probs.0", IDS, LOG_PROBS, SUPPORT, OFFSETS)
        ],
        (lambda tensors: tensors.pop(META), f"{META} is missing"),
        (_replace(META, lambda array: array.astype(np.int32)), f"{META} is missing or no flat uint8"),
        (_replace(META, lambda array: array[:-1]), f"{META} is no JSON"),
        (lambda tensors: tensors.update(stray=np.zeros(1)), r"no sample refers to the tensors \['stray'\]"),
        (lambda tensors: tensors.update({"tokens.1": tensors["tokens.0"]}), r"no sample refers to the tensors \['tokens.1'\]"),
        (_replace("tokens.0", lambda array: array.reshape(1, -1)), r"tokens came as int32 \(1, "),
        (_replace(IDS, np.ravel), "rollout_topk_token_ids came as int32 .*2-dimensional"),
        (_replace(IDS, lambda array: array[:, :-1]), "their shapes must be equal"),
        (_replace("loss_mask.0", lambda array: array[:-1]), "loss_mask has 5 rows for a response of 6"),
        (_replace("rollout_log_probs.0", lambda array: array[:-1]), "rollout_log_probs has 5 rows for a response of 6"),
        (_replace("tokens.0", lambda array: array[:3]), "response_length 6 of 3 tokens"),
        (_replace(SUPPORT, lambda array: array[:-1]), "sample 0: support offsets run from 0 to"),
        (_replace(OFFSETS, lambda array: array[::-1]), "sample 0: support offsets run from"),
        (_replace(OFFSETS, lambda array: array[[0, 1, 1, 3, 4, 5, -1]]), "row 1 of the sampling support is empty"),
        (_replace(OFFSETS, lambda array: array[[0, -1]]), "rollout_sampling_mask has 1 rows for a response of 6"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        decode_samples(damaged(change))


def _field(**fields):
    return lambda document: document["samples"][0].update(fields)


def _without(name):
    return lambda document: document["samples"][0]["arrays"].remove(name)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (lambda document: document.update(format=2), "is not of format 1"),
        (lambda document: document.pop("samples"), "is not of format 1"),
        (lambda document: document.update(samples={}), "is not of format 1"),
        (lambda document: document["samples"].append(document["samples"][0]), "the tensor .*1 is missing"),
        (lambda document: document["samples"].clear(), "no sample refers to the tensors"),
        (lambda document: document["samples"].__setitem__(0, 3), "sample 0: 3 in place of its fields"),
        (_field(colour=1), r"fields \['colour'\] are unknown"),
        (lambda document: document["samples"][0].pop("turns"), r"\['turns'\] are missing"),
        (_field(turns="2"), "turns = '2': wanted a whole number"),
        (_field(turns=True), "turns = True: wanted a whole number"),
        (_field(truncated=0), "truncated = 0: wanted true or false"),
        (_field(reward=None), "reward = None: wanted a finite number"),
        (_field(response_length=-1), "weight_versions = .*-1 tokens in all"),
        (_field(response_length=7), "weight_versions = .*7 tokens in all"),
        (_field(arrays=None), "arrays = None: wanted names among"),
        (_field(arrays=["reward"]), "wanted names among"),
        (_field(arrays=[1]), "wanted names among"),
        (_field(weight_versions=[["7", 10**12]]), "wanted .version, tokens. for every run, 6 tokens in all"),
        (_field(weight_versions=[["7", 0], ["8", 6]]), "wanted .version, tokens."),
        (_field(weight_versions=[[7, 6]]), "wanted .version, tokens."),
        (_field(weight_versions=[["7"]]), "wanted .version, tokens."),
        (_field(weight_versions=6), "wanted .version, tokens."),
        (_without("tokens"), "sample 0 has no tokens"),
        (_without("rollout_topk_log_probs"), "one of rollout_topk_token_ids and rollout_topk_log_probs"),
        (_without("rollout_sampling_mask.ids"), "one of rollout_sampling_mask.ids and rollout_sampling_mask.offsets"),
        (_without("loss_mask"), r"no sample refers to the tensors \['loss_mask.0'\]"),
    ],
)
def test_damaged_fields_are_refused(meta, message):
    with pytest.raises(ValueError, match=message):
        decode_samples(damaged(meta=meta))


def test_a_body_cut_anywhere_is_refused():
    body = encode_samples([recorded("support")])
    for length in [*range(0, len(body), 97), len(body) - 1]:
        with pytest.raises(ValueError, match="was it cut short"):
            decode_samples(body[:length])
    with pytest.raises(ValueError, match="no safetensors"):
        decode_samples(body + b"x")


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff" * 64, struct.pack("<Q", 2**60) + b"{}", b'{"error": {"message": "no"}}'])
def test_what_is_no_body_is_refused(body):
    with pytest.raises(ValueError, match="no safetensors"):
        decode_samples(body)


def test_a_type_that_no_sample_has_is_refused():
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    with pytest.raises(ValueError, match="type 'BF16'"):
        decode_samples(struct.pack("<Q", len(header)) + header + b"xx")


@pytest.mark.parametrize("seed", range(5))
def test_a_changed_header_is_refused_or_says_the_same(seed):
    """A byte of the header at a time: an error, or the very same samples; never others."""
    body = encode_samples([recorded("support")])
    size = struct.unpack("<Q", body[:8])[0]
    rng = np.random.default_rng(seed)
    for at in rng.integers(0, 8 + size, 60):
        changed = bytearray(body)
        changed[at] ^= 1 << int(rng.integers(8))
        try:
            decoded = decode_samples(bytes(changed))
        except ValueError:
            continue
        assert states(decoded) == states([recorded("support")])
