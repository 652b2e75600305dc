"""Megatron and FSDP2 on any layout make the same optimizer steps as one rank."""

import dataclasses

import pytest
import torch

from miles_sc import ScoreCenteringConfig
from miles_sc.backends.fsdp import FsdpBackend
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.data.sharding import shard
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.hub import loss_function
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import rank_in, size_of
from tests.distributed.launch import launch
from tests.distributed.rollouts import train_data

K, STEPS = 6, 2
CENTERING = ScoreCenteringConfig(top_logprobs_num=K, importance_sampling="tis", temperature=0.9)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train; what of the ranks is neither tensor nor context is data."""

    backend: str
    tensor: int = 1
    layout: ContextLayout = ContextLayout()
    bf16: bool = False
    per_token: bool = True
    checkpointing: bool = False
    model: str = "qwen3"
    inplace: bool = True

    def __str__(self) -> str:
        names = [self.backend, f"tp{self.tensor}", f"cp{self.layout.size}", self.layout.qkv_format]
        flags = {
            "allgather": self.layout.allgather,
            "bf16": self.bf16,
            "checkpointing": self.checkpointing,
            "per sample": not self.per_token,
            self.model: self.model != "qwen3",
            "out of place": not self.inplace,
        }
        return " ".join([*names, *(name for name, on in flags.items() if on)])

    @property
    def reference(self) -> "Case":
        """The same on one rank, without a layout."""
        return Case("fsdp", bf16=self.bf16, per_token=self.per_token, model=self.model, inplace=False)


def layouts(size):
    return [ContextLayout(fmt, allgather, size) for fmt in ("bshd", "thd") for allgather in (False, True)]


OTHER_MODELS = ["qwen3 tied", "qwen2", "llama"]
ALONE = [
    Case("fsdp", layout=ContextLayout("thd")),
    Case("fsdp", layout=ContextLayout("thd"), model="mistral"),
    Case("megatron"),
    Case("megatron", layout=ContextLayout("thd")),
    Case("megatron", bf16=True),
    Case("megatron", checkpointing=True),
]
PAIR = [
    Case("fsdp"),
    Case("fsdp", layout=ContextLayout("thd")),
    Case("fsdp", per_token=False),
    Case("megatron"),
    Case("megatron", tensor=2),
    Case("megatron", tensor=2, bf16=True),
    *(Case("megatron", tensor=2, model=model) for model in OTHER_MODELS),
    *(Case("megatron", layout=layout) for layout in layouts(2)),
]
FOUR = [
    *(Case("megatron", tensor=2, layout=layout) for layout in layouts(2)),
    Case("megatron", tensor=2, layout=ContextLayout("thd", False, 2), per_token=False),
    Case("megatron", tensor=2),
    Case("megatron", tensor=4),
    Case("megatron", tensor=4, model="llama"),
    Case("megatron", layout=ContextLayout("bshd", False, 2)),
    Case("megatron", layout=ContextLayout("thd", True, 4)),
    Case("megatron", layout=ContextLayout("thd", False, 4), per_token=False, checkpointing=True),
    Case("fsdp", layout=ContextLayout("thd")),
]
THREE = [Case("megatron", layout=ContextLayout("thd", False, 3)), Case("megatron", layout=ContextLayout("bshd", True, 3))]
CASES = {1: ALONE, 2: PAIR, 3: THREE, 4: FOUR}
REFERENCES = list({case.reference: None for cases in CASES.values() for case in cases})


def train(case: Case, paths: dict[str, str]) -> dict:
    """Two optimizer steps on every rank; metrics of both, and the weights after them on rank 0."""
    # Adam's first steps are the gradient's sign, and bf16 rounding flips the smallest; SGD compares what was computed
    optimizer = OptimizerSettings(
        optimizer="sgd" if case.bf16 else "adam", lr=1e-2, weight_decay=0.1, clip_grad=0.5, lr_warmup_iters=2
    )
    common = {"optimizer": optimizer, "bf16": case.bf16, "gradient_checkpointing": case.checkpointing}
    if case.backend == "fsdp":
        backend = FsdpBackend(paths[case.model], layout=case.layout, **common)
    else:
        from miles_sc.backends.megatron import MegatronBackend

        backend = MegatronBackend(paths[case.model], layout=case.layout, tensor_size=case.tensor, **common)
    settings = LossSettings(
        score_centering=CENTERING, entropy_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3",
        inplace_backward=case.inplace, vocab_size=backend.vocab_size, tensor_parallel_group=backend.groups.tensor,
    )  # fmt: skip
    data = train_data(vocab_size=backend.vocab_size, k=K)
    shards = shard(
        data,
        world_size=size_of(backend.groups.data),
        global_batch_size=len(data["tokens"]) // STEPS,
        per_token=case.per_token,
        max_tokens=18,
        layout=case.layout,
    )
    mine = shards[rank_in(backend.groups.data)]

    def micro_batches(step):
        for members in step:
            yield build_micro_batch(
                mine.data, members, backend.device, pad_token_id=0, layout=case.layout, rank=rank_in(backend.groups.context)
            )

    metrics = [
        backend.train_step(micro_batches(step), len(step), loss_function("score_centering"), settings) for step in mine.steps
    ]
    return {"metrics": metrics, "weights": backend.export_weights()}


def work(cases, paths):
    return {case: train(case, paths) for case in cases}


def tiny_model(path, name):
    """A random model in which no norm, bias or head is like another."""
    import transformers as hf

    kinds = {
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
        "qwen3 tied": (
            hf.Qwen3Config,
            hf.Qwen3ForCausalLM,
            {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
        ),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {"num_key_value_heads": 4, "rope_theta": 500.0}),
        # one key-value head, which the tensor-parallel ranks share
        # the second half of each sample no longer sees the first
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 4}),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    }
    config, model, options = kinds[name]
    torch.manual_seed(3)
    shape = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    built = model(config(**({"tie_word_embeddings": False} | shape | options), max_position_embeddings=64))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    built.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name) for name in ("qwen3", "mistral", *OTHER_MODELS)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, models):
    """``trained(ranks) -> [rank][case]``, each number of ranks launched once."""
    results = {}

    def trained(ranks):
        if ranks not in results:
            cases = CASES[ranks] + (REFERENCES if ranks == 1 else [])
            results[ranks] = launch(work, ranks, tmp_path_factory.mktemp("ranks"), cases, models)
        return results[ranks]

    return trained


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks, cases in CASES.items() for case in cases],
    ids=str,
)
def test_every_layout_makes_the_step_of_one_rank(trained, models, ranks, case):
    (expected,) = [found[case.reference] for found in trained(1)]
    tolerance = {"rel": 0.02, "abs": 2e-3} if case.bf16 else {"rel": 2e-4, "abs": 2e-6}
    results = [found[case] for found in trained(ranks)]
    for result in results:
        for step, (found, wanted) in enumerate(zip(result["metrics"], expected["metrics"], strict=True)):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                if not name.endswith("_p99"):  # the worst rank's, by definition
                    assert found[name] == pytest.approx(value, **tolerance), (step, name)
    weights, start = results[0]["weights"], load_causal_lm(models[case.model]).state_dict()
    assert weights.keys() == expected["weights"].keys() == start.keys()
    for name, wanted in expected["weights"].items():
        moved = (wanted - start[name]).norm()
        assert moved > 0 and (weights[name] - wanted).norm() <= (0.05 if case.bf16 else 1e-3) * moved, name
