"""Four tensor-parallel ranks with uneven vocabularies, and how little the loss sends over two tensor and two context ranks."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sc import ScoreCenteringConfig, selected_log_probs
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import loss_function
from miles_sc.loss.support_log_probs import support_log_probs
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import rank_in
from tests.distributed.dense import BOUNDS, ENTROPY_COEF, KL_COEF, TEMPERATURE, dense_step, rows_of
from tests.distributed.launch import device, launch
from tests.distributed.rollouts import train_data
from tests.loss.oracle import dense_entropy, dense_log_probs, dense_support_entropy, dense_support_log_probs

K, RANKS = 4, 4
LENGTHS = ((3, 4), (5, 0), (1, 2), (2, 3))
RESPONSES = sum(response for _, response in LENGTHS)

# true vocabulary, columns of each rank
SPLITS = {
    "10 columns as torch.chunk cuts them": (10, (3, 3, 3, 1)),
    "9 columns, which leave the last rank none": (9, (3, 3, 3, 0)),
    "37 columns padded to equal parts": (37, (10, 10, 10, 10)),
    "a rank that holds padding alone": (38, (13, 13, 13, 13)),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SCORING = {
    "selected": (selected_log_probs, dense_log_probs, dense_entropy),
    "support": (support_log_probs, dense_support_log_probs, dense_support_entropy),
}
SCORES = [(split, name, dtype) for name in SCORING for split in SPLITS for dtype in DTYPES]
LOSSES = [(split, filtered, kl) for filtered in (False, True) for split in SPLITS for kl in ("", "k3")]
TRAFFIC = [(filtered, entropy, kl) for filtered in (False, True) for entropy in (False, True) for kl in ("", "k3")]


# --- problems


@cache
def rollout(vocab_size: int, filtered: bool):
    data = train_data(vocab_size=vocab_size, k=K, filtered=filtered, lengths=LENGTHS, seed=4)
    active = sum(int(mask.sum()) for mask in data["loss_masks"])
    return data | {"row_weights": [1 / active if mask.any() else 0.0 for mask in data["loss_masks"]]}


@cache
def logits_of(split: str, dtype: torch.dtype) -> torch.Tensor:
    """[RESPONSES, columns of all ranks]; the padding is large."""
    vocab_size, widths = SPLITS[split]
    logits = 2 * torch.randn(RESPONSES, sum(widths), dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    logits[:, vocab_size:] += 9
    return logits.to(dtype)


@cache
def masked_logits_of(split: str, dtype: torch.dtype) -> torch.Tensor:
    """The same, and row 1 has no mass on the first rank."""
    logits = logits_of(split, dtype).clone()
    logits[1, : SPLITS[split][1][0]] = -torch.inf
    return logits


@cache
def scored_ids(split: str) -> torch.Tensor:
    """[RESPONSES, 1+K]: from every rank, with unused slots and an id that stands twice; none where row 1 has no mass."""
    vocab_size, widths = SPLITS[split]
    generator = torch.Generator().manual_seed(9)
    ids = torch.stack(
        [torch.randperm(vocab_size - widths[0], generator=generator)[: 1 + K] + widths[0] for _ in range(RESPONSES)]
    )
    ids[2:] -= ids[2:] % 2 * widths[0]
    ids[3, 2], ids[4, 1:], ids[5, 3:], ids[6, 0] = ids[3, 1], -1, -1, -1
    return ids


def upstream() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10)
    shapes = ((RESPONSES, 1 + K), (RESPONSES,))
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)


def settings_of(vocab_size: int, filtered: bool, entropy: bool, kl: str, group) -> LossSettings:
    config = ScoreCenteringConfig(
        top_logprobs_num=K, importance_sampling="tis", temperature=TEMPERATURE, top_k=K if filtered else -1, **BOUNDS
    )
    return LossSettings(
        score_centering=config,
        entropy_coef=ENTROPY_COEF if entropy else 0.0,
        use_kl_loss=bool(kl),
        kl_loss_coef=KL_COEF,
        kl_loss_type=kl or "k1",
        vocab_size=vocab_size,
        tensor_parallel_group=group,
    )


# --- what the ranks send


class Sent(TorchDispatchMode):
    """Every collective, whoever calls it: (its name, floats or bytes that this rank gives to it, ranks of its group)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.calls.append((func._opname, *_given(func._opname, args)))
        return func(*args, **(kwargs or {}))


def _given(name: str, args) -> tuple[int, tuple[int, ...]]:
    tensors = [tensor for argument in args for tensor in _flat(argument)]
    ranks = ()
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    return tensors[-1].numel() if tensors else 0, ranks


def _flat(argument):
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for part in argument for tensor in _flat(part)] if isinstance(argument, list | tuple) else []


# --- on the ranks


def scores(split: str, name: str, dtype: torch.dtype, group) -> dict:
    vocab_size, widths = SPLITS[split]
    shard = masked_logits_of(split, dtype).split(widths, dim=1)[dist.get_rank()].to(device(), copy=True).requires_grad_()
    options = {"group": group, "vocab_size": vocab_size, "temperature": TEMPERATURE, "with_entropy": True}
    log_probs, entropy = SCORING[name][0](shard, scored_ids(split).to(device()), **options)
    torch.autograd.backward([log_probs, entropy], [g.to(log_probs) for g in upstream()])
    return {"log_probs": log_probs.detach().cpu(), "entropy": entropy.detach().cpu(), "gradient": shard.grad.cpu()}


def loss_of(split: str, filtered: bool, kl: str, group) -> dict:
    vocab_size, widths = SPLITS[split]
    shard = logits_of(split, torch.float64).split(widths, dim=1)[dist.get_rank()].to(device(), copy=True).requires_grad_()
    batch = build_micro_batch(rollout(vocab_size, filtered), range(len(LENGTHS)), device(), pad_token_id=0).loss
    settings, guard = settings_of(vocab_size, filtered, True, kl, group), FiniteGuard()
    output = loss_function("score_centering")(batch, shard, settings, guard)
    output.loss.backward()
    guard.raise_if_tripped()
    return {"loss": output.loss.item(), "gradient": shard.grad.cpu()}


def traffic(filtered: bool, entropy: bool, kl: str, mesh) -> dict:
    """Per pass T and the collectives of forward and backward."""
    context, tensor = mesh.get_group("context"), mesh.get_group("tensor")
    layout, vocab_size, passes = ContextLayout("thd", False, 2), 37, []
    settings = settings_of(vocab_size, filtered, entropy, kl, tensor)
    for members in ([0, 1], [2], [], [3]):
        micro = build_micro_batch(
            rollout(vocab_size, filtered), members, device(), pad_token_id=0, layout=layout, rank=rank_in(context)
        )
        logits = torch.randn(len(micro.rows), 20, device=device(), requires_grad=True)
        with Sent() as forward:
            output = loss_function("score_centering")(micro.loss, logits, settings, FiniteGuard())
        with Sent() as backward:
            output.loss.backward()
        passes.append((len(micro.rows), forward.calls, backward.calls))
    return {"tensor": tuple(dist.get_process_group_ranks(tensor)), "passes": passes}


def work():
    with Sent() as seen:
        dist.all_reduce(torch.ones(3, device=device()))
        dist.broadcast(torch.ones(2, device=device()), 0)
    group = dist.new_group(range(RANKS))  # one for all: a group may serve several vocabularies
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("context", "tensor"))
    return {
        "scores": {case: scores(*case, group) for case in SCORES},
        "losses": {case: loss_of(*case, group) for case in LOSSES},
        "traffic": {case: traffic(*case, mesh) for case in TRAFFIC},
        "seen": seen.calls,
        "another width": refused(0, group, 10),
        "another vocabulary": refused(3, dist.new_group(range(RANKS)), 9 + dist.get_rank() % 2),
    }


def refused(columns, group, vocab_size):
    """What is said of a split, on every rank and before any reduction, so that nobody waits."""
    logits, ids = torch.zeros(1, columns, device=device()), torch.zeros(1, 2, dtype=torch.long, device=device())
    try:
        selected_log_probs(logits, ids, group=group, vocab_size=vocab_size)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(work, RANKS, tmp_path_factory.mktemp("traffic"))


# --- vocabularies that do not divide


@pytest.mark.parametrize(("split", "name", "dtype"), SCORES, ids=str)
def test_an_uneven_vocabulary_scores_as_a_whole_one(ranks, split, name, dtype):
    vocab_size, widths = SPLITS[split]
    results = [rank["scores"][split, name, dtype] for rank in ranks]
    _, dense, entropy_of = SCORING[name]
    leaf = masked_logits_of(split, dtype)[:, :vocab_size].to(torch.float64, copy=True).requires_grad_()
    log_probs = dense(leaf, scored_ids(split), temperature=TEMPERATURE)
    # an entropy over the support reads all its slots, the one over the vocabulary none
    entropy = entropy_of(leaf, *[scored_ids(split)] * (name == "support"), temperature=TEMPERATURE)
    given = upstream()
    (gradient,) = torch.autograd.grad([log_probs, entropy], leaf, given)
    tolerance = {"atol": 1e-13, "rtol": 1e-13} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-6}
    for result in results:
        torch.testing.assert_close(result["log_probs"].double(), log_probs.detach(), **tolerance)
        torch.testing.assert_close(result["entropy"].double(), entropy.detach(), **tolerance)
    found = torch.cat([result["gradient"] for result in results], dim=1)
    assert [result["gradient"].shape[1] for result in results] == list(widths)
    # computed in float32, rounded to bf16 once
    once = {"atol": 2e-6, "rtol": 2**-8} if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(found[:, :vocab_size].double(), gradient, **once)
    assert not found[:, vocab_size:].any()


@pytest.mark.parametrize(("split", "filtered", "kl"), LOSSES)
def test_an_uneven_vocabulary_has_the_loss_of_a_whole_one(ranks, split, filtered, kl):
    vocab_size, _ = SPLITS[split]
    results = [rank["losses"][split, filtered, kl] for rank in ranks]
    rows = rows_of(rollout(vocab_size, filtered), per_token=True)
    logits = logits_of(split, torch.float64)[:, :vocab_size]
    dense = dense_step(logits, rows, "tis", filtered=filtered, entropy=True, kl=kl)
    assert [result["loss"] for result in results] == [pytest.approx(dense.loss.item(), abs=1e-13)] * RANKS
    found = torch.cat([result["gradient"] for result in results], dim=1)
    torch.testing.assert_close(found[:, :vocab_size], dense.gradient, atol=1e-13, rtol=1e-12)
    assert not found[:, vocab_size:].any() and dense.gradient.abs().max() > 1e-3


def test_columns_that_change_are_refused(ranks):
    told = [rank["another width"].split(":")[0] for rank in ranks]
    known = (3, 3, 3, 1)
    assert told == [f"0 columns on this rank, and {n} at an earlier call with this vocabulary on the same group" for n in known]


def test_a_vocabulary_that_differs_between_ranks_is_refused_on_all(ranks):
    assert {rank["another vocabulary"].split(":")[0] for rank in ranks} == {
        "vocab_size = [9, 10, 9, 10] on the ranks of the group"
    }


# --- traffic


def all_reduces(rows: int, *, filtered: bool, entropy: bool, kl: str) -> list[int]:
    """Floats of each reduction over the tensor-parallel group, in order."""
    if not filtered:
        # a maximum and a sum a row, then its selected logits
        return [rows, rows, rows * (1 + K)] + [rows] * entropy
    # the support's logits and nothing else; a reference is compared over the whole vocabulary
    return [rows * (1 + K)] + [rows, rows, rows] * bool(kl)


@pytest.mark.parametrize(("filtered", "entropy", "kl"), TRAFFIC)
def test_a_row_sends_its_scalars_and_selected_logits_over_the_tensor_group_and_nothing_else(ranks, filtered, entropy, kl):
    for rank in ranks:
        result = rank["traffic"][filtered, entropy, kl]
        for rows, forward, _ in result["passes"]:
            reduced = [floats for name, floats, _ in forward if name == "allreduce_"]
            assert reduced == all_reduces(rows, filtered=filtered, entropy=entropy, kl=kl)
            assert {group for *_, group in forward} == {result["tensor"]}  # so nothing crosses the context group
            assert {name for name, *_ in forward} <= {"allreduce_", "allgather_"}
            plain = not (entropy or kl)
            assert not plain or sum(reduced) == rows * (1 + K if filtered else K + 3)
    # empty passes, and passes whose rows the context ranks share unevenly
    counts = [[rows for rows, *_ in rank["traffic"][filtered, entropy, kl]["passes"]] for rank in ranks]
    assert counts[0] == counts[1] and counts[2] == counts[3] and counts[0] != counts[2] and counts[0][2] == 0


@pytest.mark.parametrize("case", TRAFFIC)
def test_backward_sends_nothing(ranks, case):
    assert [backward for rank in ranks for *_, backward in rank["traffic"][case]["passes"]] == [[]] * 4 * RANKS


def test_the_ranks_ask_for_each_others_widths_once(ranks):
    for rank in ranks:
        passes = [forward for case in TRAFFIC for _, forward, _ in rank["traffic"][case]["passes"]]
        gathers = [[name for name, *_ in forward].count("allgather_") for forward in passes]
        # an object travels as its size and its bytes
        assert gathers == [2] + [0] * (len(passes) - 1)


def test_the_wrapping_sees_collectives(ranks):
    assert [rank["seen"] for rank in ranks] == [[("allreduce_", 3, (0, 1, 2, 3)), ("broadcast_", 2, (0, 1, 2, 3))]] * RANKS
