"""New weights before they leave: what fits the model, which bytes go out, which versions an answer may come from. Real servers:
tests/live."""

import asyncio
import json
import shutil
import subprocess
import sys
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_sc.rollout.engines.sglang import weights
from miles_sc.rollout.engines.sglang.checkpoint import Checkpoint
from miles_sc.rollout.engines.sglang.versions import StaleWeights, VersionBook
from miles_sc.rollout.engines.sglang.weights import DiskUpdate, TensorUpdate

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def model_folder(folder, *, tied=False, **config):
    shapes = {EMBEDDING: (6, 4), NORM: (4,)} | ({} if tied else {HEAD: (6, 4)})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 6, "tie_word_embeddings": tied, **config}))
    (folder / "tokenizer.json").write_text("{}")
    names = list(shapes)
    for number, part in enumerate((names[:1], names[1:]), start=1):
        save_file({name: torch.zeros(shapes[name]) for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def state(**changes):
    return {EMBEDDING: np.arange(24.0).reshape(6, 4), HEAD: np.ones((6, 4)), NORM: np.ones(4), **changes}


# --- what fits


@pytest.mark.parametrize(
    ("config", "vocabulary"), [({}, 6), ({"vocab_size": None}, None), ({"text_config": {"vocab_size": 9}}, 9)]
)
def test_the_vocabulary_of_a_model(tmp_path, config, vocabulary):
    assert Checkpoint.read(model_folder(tmp_path / "model", **config)).vocab_size == vocabulary


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json: give the directory"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        ({}, [HEAD], f"missing {HEAD}, unexpected none"),
        ({"a": np.ones(1), "b": np.ones(1)}, [], "missing none, unexpected a, b"),
        ({NORM: np.ones((2, 2))}, [], r"model.norm.weight has shape \[2, 2\] and \[4\]"),
        ({}, [EMBEDDING, HEAD, NORM], "no weights at all"),
        ({NORM: [1.0] * 4}, [], "model.norm.weight is a list: send a numpy array or a torch tensor"),
    ],
)
def test_a_state_that_would_load_in_part_is_refused(tmp_path, changes, without, message):
    sent = {name: value for name, value in state(**changes).items() if name not in without}
    with pytest.raises(ValueError, match=message):
        Checkpoint.read(model_folder(tmp_path / "model")).matching(sent)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["arrays", "tensors"])
def test_a_tied_layer_is_sent_once_and_may_not_differ(tmp_path, kind):
    checkpoint = Checkpoint.read(model_folder(tmp_path / "model", tied=True))
    sent = {name: kind(value) for name, value in state(**{HEAD: state()[EMBEDDING]}).items()}
    assert (
        set(checkpoint.matching(sent)) == set(checkpoint.matching({k: sent[k] for k in (EMBEDDING, NORM)})) == {EMBEDDING, NORM}
    )
    with pytest.raises(ValueError, match="are tied in .* and differ in the new weights: send one"):
        checkpoint.matching(sent | {HEAD: kind(np.ones((6, 4)))})


def test_weights_that_nothing_describes_are_taken_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint.read(tmp_path).matching({"any": np.ones(2)}).keys() == {"any"}


# --- what goes out


def test_a_checkpoint_holds_every_weight_and_the_models_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARD_BYTES", 100)
    shared = torch.arange(24.0).reshape(4, 6)
    read_only = np.arange(4.0, dtype=np.float32)
    read_only.flags.writeable = False
    sent = {EMBEDDING: shared.T, HEAD: shared.T.bfloat16(), "again": shared, NORM: read_only}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = DiskUpdate(sent, "7", model_path=model_folder(tmp_path / "model"), folder=tmp_path)
    (folder,) = tmp_path.glob("weights-*")
    shards = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in folder.iterdir()} - {file.name for file in shards} == {"config.json", "tokenizer.json"}
    assert len(shards) == 4
    written = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert written.keys() == sent.keys()
    for name, value in sent.items():
        assert torch.equal(written[name], torch.as_tensor(np.array(value)) if name == NORM else value)
        assert written[name].dtype == (torch.bfloat16 if name == HEAD else torch.float32)
    update.discard()
    assert not folder.exists()


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        DiskUpdate({"odd": np.array(["text"])}, "7", model_path=model_folder(tmp_path / "model"), folder=tmp_path)
    assert not list(tmp_path.glob("weights-*"))


class RecordingServer:
    """Notes what it is told."""

    tensor_ranks = 2

    def __init__(self):
        self.control, self.told = self, []

    async def post(self, path, body):
        self.told.append((path, body))


READ = """
import base64, pickle, sys, torch, torch.multiprocessing
for line in sys.stdin:
    for name, value in pickle.loads(base64.b64decode(line)):
        print(name, value.dtype, value.tolist())
"""


def test_every_rank_reads_the_weights_in_shared_memory(monkeypatch):
    monkeypatch.setattr(weights, "BUCKET_BYTES", 16)
    server, before = RecordingServer(), torch.multiprocessing.get_sharing_strategy()
    update = TensorUpdate({"a": np.array([1.5, 2.5]), "b": torch.tensor([3.5]).bfloat16(), "c": np.array([4.5])}, "7")
    asyncio.run(update.send([server]))
    assert torch.multiprocessing.get_sharing_strategy() == before
    paths, bodies = zip(*server.told, strict=True)
    assert paths == ("/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update")
    assert [(body["weight_version"], body["flush_cache"]) for body in bodies[1:-1]] == [(None, False), ("7", True)]
    for rank in range(2):  # one after the other: what a reader releases is still there for the next
        payloads = "\n".join(body["serialized_named_tensors"][rank] for body in bodies[1:-1])
        read = subprocess.run([sys.executable, "-c", READ], input=payloads, capture_output=True, text=True, check=True)
        assert read.stdout.splitlines() == [
            "a torch.float64 [1.5, 2.5]",
            "b torch.bfloat16 [3.5]",
            "c torch.float64 [4.5]",
        ]


def test_a_live_tensor_is_copied_when_it_is_handed_over():
    live = torch.zeros(2)
    update = TensorUpdate({"live": live}, "7")
    live.fill_(9.0)
    ((((_, kept),), _),) = update._parts()
    assert kept.tolist() == [0.0, 0.0]


def test_too_little_shared_memory_is_an_error_and_no_crash(monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20))
    server = RecordingServer()
    with pytest.raises(ValueError, match="has 1 MiB free and these weights need 4 MiB .*set update_weights_by to disk"):
        asyncio.run(TensorUpdate({"a": np.zeros(1 << 20, np.float32)}, "7").send([server]))
    assert [path for path, _ in server.told] == ["/begin_weight_update", "/end_weight_update"]


# --- which versions an answer may come from


def test_an_answer_comes_from_the_weights_of_its_call_or_newer_ones():
    book = VersionBook(["default", "left over"])
    first = book.current
    for version in ("default", "left over"):
        book.check([version], first)
    book.announce("1")
    book.check(["default", "1"], first)
    assert book.current == first
    book.settle("1")
    book.check(["default", "1"], first)
    for versions, named in ((["default", "1"], "'default'"), (["left over"], "'left over'"), (["2"], "'2'"), ([""], "''")):
        with pytest.raises(StaleWeights, match=f"sampled by weight version {named}, expected '1'"):
            book.check(versions, book.current)


def test_a_name_that_is_used_again_is_the_newer_weights():
    book = VersionBook(["7"])
    for version in ("8", "7"):
        book.announce(version)
        book.settle(version)
    book.check(["7"], book.current)
    with pytest.raises(StaleWeights, match="expected '7'"):
        book.check(["8"], book.current)
