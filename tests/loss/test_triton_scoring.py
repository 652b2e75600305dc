"""The Triton kernels against dense float64: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import importlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from miles_sc import selected_log_probs
from miles_sc.loss import triton_scoring
from miles_sc.loss.logit_rows import LogitRows
from miles_sc.loss.scoring_kernel import RowGradient
from miles_sc.loss.vocabulary import VocabularyShard
from tests.loss.oracle import dense_entropy, dense_log_probs

triton = pytest.importorskip("triton", reason="the kernels need Triton")

# the interpreter computes with numpy, which speaks of every infinity
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

scoring = importlib.import_module("miles_sc.loss.selected_log_probs")  # the package has a function of that name

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
VOCAB, WIDTH = 41, 46  # five padded columns; three blocks of 16 and a tail of 9 columns in the third
IDS = torch.tensor(
    [[3, 3, 0, 40, 17], [0, 1, 2, 23, 22], [40, 5, 5, 5, 39], [7, -1, 9, -1, 31], [-1, -1, -1, -1, -1], [20, 30, 20, 30, 16]]
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf


def private_copy(monkeypatch) -> ModuleType:
    """The module imported anew: Triton decides at a kernel's definition what becomes of it, and the package's stays as it is."""
    spec = importlib.util.spec_from_file_location("triton_scoring_copy", triton_scoring.__file__)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copy)
    spec.loader.exec_module(copy)
    return copy


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def kernels(device, monkeypatch):
    """The module whose kernels run on the device, in blocks of 16 columns."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # tl.max and tl.sum are themselves jitted functions, of the time when Triton was imported
        monkeypatch.setattr(triton.JITFunction, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))
    module = private_copy(monkeypatch) if device == "cpu" else triton_scoring
    monkeypatch.setattr(module, "BLOCK_COLUMNS", 16)
    return module


def all_rows(logits):
    return LogitRows.of(None, len(logits))


def close(actual, expected, atol=2e-6, rtol=0.0):
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=atol, rtol=rtol, equal_nan=True)


def random_logits(rows=6, width=WIDTH, dtype=torch.float32, seed=0):
    return (2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def cotangents(ids, seed=5):
    """Upstream gradients of log-probs and entropy."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ids.shape, generator=generator), torch.randn(len(ids), generator=generator)


def dense(logits, ids, *, vocab_size=VOCAB, temperature=1.0, with_entropy=True):
    """Log-probs, entropy and the gradient under :func:`cotangents`, in float64 by autograd."""
    leaf = logits.detach().double().requires_grad_()
    log_probs = dense_log_probs(leaf, ids, vocab_size=vocab_size, temperature=temperature)
    entropy = dense_entropy(leaf, vocab_size=vocab_size, temperature=temperature)
    grad_log_probs, grad_entropy = cotangents(ids)
    loss = (log_probs * grad_log_probs).sum() + (entropy * grad_entropy).sum() * with_entropy
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(loss, leaf)[0]


def scored(kernels, logits, ids, *, vocab_size=VOCAB, temperature=1.0, with_entropy=True, ranks=1, in_place=False):
    """The same from the kernels, with the columns on ``ranks`` ranks whose reductions are written out."""
    widths = [len(columns) for columns in torch.arange(logits.shape[1]).chunk(ranks)]
    starts = [sum(widths[:rank]) for rank in range(ranks)]
    group = None if ranks == 1 else "two ranks"
    shards = [VocabularyShard(s, min(max(vocab_size - s, 0), w), vocab_size, group) for s, w in zip(starts, widths, strict=True)]
    local_logits, ranked = logits.split(widths, dim=1), [kernels.TritonKernel(shard, temperature) for shard in shards]
    statistics = [
        kernel.statistics(z, all_rows(z), *kernel.shard.local(ids), with_entropy=with_entropy)
        for z, kernel in zip(local_logits, ranked, strict=True)
    ]
    top = torch.stack([s.largest for s in statistics]).amax(dim=0)
    to_p = [(s.largest - top).exp().where(s.largest > -INF, 0.0 if group else torch.nan) for s in statistics]
    to_p = [share.where(~s.largest.isnan(), torch.nan) for share, s in zip(to_p, statistics, strict=True)]
    shares = [factor * s.log_sum.exp() for factor, s in zip(to_p, statistics, strict=True)]
    log_sum = sum(shares).log() if group else statistics[0].log_sum
    selected = sum(s.selected for s in statistics)
    log_probs = torch.where(ids >= 0, (selected - top[:, None]) - log_sum[:, None], 0.0)
    entropy = None
    if with_entropy:
        parts = zip(statistics, shares, strict=True)
        means = [torch.where(s.largest == -INF, 0.0, share * (s.mean + s.largest - top)) for s, share in parts]
        entropy = log_sum - sum(means) / log_sum.exp()

    grad_log_probs, grad_entropy = (g.to(logits.device) for g in cotangents(ids.cpu()))
    gradients = []
    for z, kernel, s, factor in zip(local_logits, ranked, statistics, to_p, strict=True):
        columns, owned = kernel.shard.local(ids)
        gradient = z if in_place else torch.full_like(z, torch.nan)
        factor = factor * (-log_sum).exp() / temperature
        upstream = RowGradient(
            selected=torch.where(owned, grad_log_probs, 0.0) / temperature,
            scale=-torch.where(ids >= 0, grad_log_probs, 0.0).sum(dim=1) * factor,
            entropy_scale=-grad_entropy * factor if with_entropy else None,
            entropy_shift=top + log_sum - entropy if with_entropy else None,
        )
        kernel.write_gradient(gradient, z, all_rows(z), columns, owned, upstream, s.saved)
        gradients.append(gradient)
    return log_probs, entropy, torch.cat(gradients, dim=1)


# --- Values and gradients


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_equal_dense(kernels, device, dtype, temperature, with_entropy, ranks):
    """Duplicates, unused slots, an unused row and padded columns that must not be read, over several blocks."""
    logits = random_logits(dtype=dtype)
    options = {"temperature": temperature, "with_entropy": with_entropy}
    expected = dense(logits, IDS, **options)
    logits[:, VOCAB:] = torch.nan
    log_probs, entropy, gradient = scored(kernels, logits.to(device), IDS.to(device), ranks=ranks, **options)
    close(log_probs, expected[0])
    if with_entropy:
        close(entropy, expected[1])
    assert (log_probs.cpu()[IDS == -1] == 0).all()
    assert gradient.dtype == dtype
    close(gradient, expected[2], rtol=torch.finfo(dtype).eps)
    assert (gradient[:, VOCAB:] == 0).all()
    if not with_entropy:
        assert (gradient[4] == 0).all()


@pytest.mark.parametrize("block", [64, 4096])
def test_a_row_within_one_block(kernels, device, block, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_COLUMNS", block)
    logits = random_logits()
    actual = scored(kernels, logits.to(device), IDS.to(device))
    for got, wanted in zip(actual, dense(logits, IDS), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 32, 45, 46])
def test_vocabularies_around_the_block(kernels, device, vocab_size):
    """With one more column of padding, and with the second rank's columns all padding for the small ones."""
    logits = random_logits()
    ids = torch.where(IDS < 0, IDS, IDS % vocab_size)
    for ranks in (1, 2):
        actual = scored(kernels, logits.to(device), ids.to(device), vocab_size=vocab_size, ranks=ranks)
        for got, wanted in zip(actual, dense(logits, ids, vocab_size=vocab_size), strict=True):
            close(got, wanted)


def test_one_column(kernels, device):
    logits, ids = random_logits(rows=3, width=1), torch.tensor([[0, 0], [-1, 0], [-1, -1]])
    log_probs, entropy, gradient = scored(kernels, logits.to(device), ids.to(device), vocab_size=1)
    for zero in (log_probs, entropy, gradient):
        close(zero, torch.zeros(zero.shape))


@pytest.mark.parametrize("slots", [1, 2, 129, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_upstream_of_equal_ids_is_added_up_before_it_is_rounded(kernels, device, dtype, slots):
    """One id in every slot but the last, and 41 ids many times over."""
    ids = torch.stack([torch.full((slots,), 17), torch.arange(slots) * 7 % VOCAB])
    ids[0, -1] = 3
    logits = random_logits(rows=2, dtype=dtype)
    log_probs, _, gradient = scored(kernels, logits.to(device), ids.to(device), with_entropy=False)
    expected = dense(logits, ids, with_entropy=False)
    close(log_probs, expected[0])
    close(gradient, expected[2], atol=1e-6 * slots**0.5 + 2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_out_of_place_to_the_bit(kernels, device, dtype, with_entropy):
    logits, ids = random_logits(dtype=dtype).to(device), IDS.to(device)
    before = logits.clone()
    for ranks in (1, 2):
        expected = scored(kernels, logits, ids, with_entropy=with_entropy, ranks=ranks)[2]
        assert torch.equal(logits, before)
        actual = scored(kernels, logits.clone(), ids, with_entropy=with_entropy, ranks=ranks, in_place=True)[2]
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "strided columns", "strided rows", "sliced"])
def test_non_contiguous_logits(kernels, device, layout, in_place):
    base = random_logits().to(device)
    logits = {
        "transposed": lambda: base.T.contiguous().T,
        "strided columns": lambda: base.repeat_interleave(2, dim=1)[:, ::2],
        "strided rows": lambda: base.repeat_interleave(2, dim=0)[::2],
        "sliced": lambda: torch.cat([base, torch.full_like(base, torch.nan)], dim=1)[:, :WIDTH],
    }[layout]()
    expected = dense(base.cpu(), IDS)
    actual = scored(kernels, logits, IDS.to(device), in_place=in_place)
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted)
    assert torch.equal(logits, base) != in_place


def test_non_contiguous_ids_and_upstream(kernels, device):
    logits, ids = random_logits(), IDS.T.contiguous().T
    for got, wanted in zip(scored(kernels, logits.to(device), ids.to(device)), dense(logits, IDS), strict=True):
        close(got, wanted)


# --- Rows where they lie


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [2, 3], [0, 5], [1, 2, 4], []], ids=str)
def test_chosen_rows_equal_dense_on_a_copy_of_them(kernels, device, monkeypatch, rows, dtype, layout, in_place):
    """One launch for all runs; what lies between them gets no gradient, whatever it holds."""
    monkeypatch.setattr(scoring, "_kernel", lambda logits, shard, temperature, _: kernels.TritonKernel(shard, temperature))
    logits, ids, chosen = random_logits(dtype=dtype), IDS[rows], torch.tensor(rows, dtype=torch.long)
    expected = dense(logits[chosen], ids)
    logits[[row for row in range(6) if row not in rows]] = torch.nan
    leaf = logits.to(device).requires_grad_()
    given = leaf * 1 if layout == "rows" else (leaf * 1).T.contiguous().T
    log_probs, entropy = selected_log_probs(
        given, ids.to(device), rows=rows, vocab_size=VOCAB, with_entropy=True, inplace_backward=in_place
    )
    torch.autograd.backward((log_probs, entropy), tuple(g.to(device) for g in cotangents(ids)))
    close(log_probs, expected[0])
    close(entropy, expected[1])
    whole = torch.zeros(6, WIDTH, dtype=torch.float64)
    whole[chosen] = expected[2]
    close(leaf.grad, whole, rtol=torch.finfo(dtype).eps)


# --- Masked and broken rows


@pytest.mark.parametrize("forbidden", [-INF, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_logits(kernels, device, ranks, temperature, forbidden):
    """A first block without mass, a last one, a whole rank, all but one column; a forbidden token among the selected."""
    logits = random_logits()
    masked = torch.zeros(6, WIDTH, dtype=torch.bool)
    masked[:, [1, 5]] = masked[0, :20] = masked[1, 23:] = masked[2, 16:] = masked[5, :40] = True
    masked[5, 40] = False
    actual = scored(
        kernels, logits.masked_fill(masked, forbidden).to(device), IDS.to(device), ranks=ranks, temperature=temperature
    )
    # a very small logit has the same distribution, and a gradient that dense autograd can form
    expected = dense(logits.masked_fill(masked, -1e4), IDS, temperature=temperature)
    asked = masked.gather(1, IDS.clamp(min=0)) & (IDS >= 0)
    close(actual[0][~asked.to(device)], expected[0][~asked])
    assert (actual[0][asked.to(device)] < -1e9).all() and asked.any()
    close(actual[1], expected[1])
    close(actual[2], expected[2])


def test_a_rank_without_mass(kernels, device):
    logits = random_logits().to(device)
    logits[0] = -INF
    shard = VocabularyShard(0, VOCAB, VOCAB, None)
    statistics = kernels.TritonKernel(shard, 0.7).statistics(
        logits, all_rows(logits), *shard.local(IDS.to(device)), with_entropy=True
    )
    assert statistics.largest[0] == -INF and statistics.log_sum[0] == 0 and statistics.mean[0] == 0
    assert (statistics.selected[0] == -INF).all()
    close(statistics.largest[1:], logits[1:, :VOCAB].cpu().amax(dim=1) / 0.7)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("column", [0, 19, 40])
@pytest.mark.parametrize("broken", [math.nan, INF])
@pytest.mark.parametrize("others", ["finite", "-inf", "broken"])
def test_nan_and_inf_are_loud(kernels, device, broken, column, ranks, others):
    """In the row's every score and gradient, and in no other row's. ``others`` fills its rank's half of the row."""
    logits = random_logits()
    expected = dense(logits, IDS)
    if others != "finite":
        half = slice(0, 23) if column < 23 else slice(23, VOCAB)
        logits[2, half] = {"-inf": -INF, "broken": broken}[others]
    logits[2, column] = broken
    log_probs, entropy, gradient = scored(kernels, logits.to(device), IDS.to(device), ranks=ranks)
    assert log_probs[2].isnan().all() and entropy[2].isnan() and gradient[2, :VOCAB].isnan().all()
    assert (gradient[2, VOCAB:] == 0).all()
    rest = torch.arange(6) != 2
    for got, wanted in zip((log_probs, entropy, gradient), expected, strict=True):
        close(got.cpu()[rest], wanted[rest])


# --- Nothing to score


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_rows(kernels, device, with_entropy):
    log_probs, entropy, gradient = scored(
        kernels, torch.zeros(0, WIDTH, device=device), IDS[:0].to(device), with_entropy=with_entropy
    )
    assert log_probs.shape == (0, 5) and gradient.shape == (0, WIDTH) and (entropy is None or entropy.shape == (0,))


@pytest.mark.parametrize("columns", [0, 20])
def test_a_rank_of_padding(kernels, device, columns):
    """No true column: without columns at all, or with padding only."""
    logits = torch.full((6, columns), torch.nan, device=device)
    nowhere = torch.zeros_like(IDS, device=device)
    kernel = kernels.TritonKernel(VocabularyShard(VOCAB, 0, VOCAB, "two ranks"), 1.0)
    statistics = kernel.statistics(logits, all_rows(logits), nowhere, nowhere > 0, with_entropy=True)
    assert (statistics.largest == -INF).all()
    for zero in (statistics.log_sum, statistics.selected, statistics.mean):
        assert (zero == 0).all()
    one = torch.ones(6, device=device)
    upstream = RowGradient(torch.zeros(6, 5, device=device), one, one, one)
    kernel.write_gradient(logits, logits, all_rows(logits), nowhere, nowhere > 0, upstream, statistics.saved)
    assert (logits == 0).all()


# --- Precision


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_at_a_large_vocabulary(kernels, device, dtype, scale, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_COLUMNS", triton_scoring.BLOCK_COLUMNS if device == "cuda" else 4096)
    vocab = 151_936
    logits = (scale * torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))).to(dtype)
    ids = logits.float().topk(129, dim=1).indices
    actual = scored(kernels, logits.to(device), ids.to(device), vocab_size=vocab)
    expected = dense(logits, ids, vocab_size=vocab)
    close(actual[0], expected[0], atol=1.5e-6)
    close(actual[1], expected[1], atol=4e-6)
    close(actual[2], expected[2], rtol=torch.finfo(dtype).eps)


def test_large_logits_lose_nothing(kernels, device):
    """``top + log_sum`` would be rounded at the logits' scale, a thousandth here."""
    logits = random_logits() + 16384
    log_probs, _, gradient = scored(kernels, logits.to(device), IDS.to(device), with_entropy=False)
    expected = dense(logits, IDS, with_entropy=False)
    close(log_probs, expected[0])
    close(gradient, expected[2])


# --- Where the kernels are there


def test_available_for_the_dtypes_of_training(kernels, device):
    available = [
        d for d in (*DTYPES, torch.float64, torch.float8_e4m3fn) if kernels.is_available(torch.zeros(1, 1).to(device, d))
    ]
    assert available == DTYPES


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not private_copy(monkeypatch).is_available(torch.zeros(1, 1))


# --- For a GPU, also where there is none

INTEGERS = ("row_stride", "gradient_stride", "logits_stride", "width", "padded_width", "slots")
OF_ENTROPY = ("mean_out", "entropy_scale", "entropy_shift")


def compiled(kernel, *, capability, dtype, with_entropy, chosen):
    """The kernel as a launch with 128 candidates compiles it."""
    constants = {"BLOCK": triton_scoring.BLOCK_COLUMNS, "SLOTS": 256} | ({} if with_entropy else dict.fromkeys(OF_ENTROPY))
    constants |= {} if chosen else {"places": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(INTEGERS, "i32") | {"inverse_temperature": "fp32", "columns": "*i64", "places": "*i64"}
    types |= {"logits": f"*{dtype}", "gradient": f"*{dtype}"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants),
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"num_warps": 8},
    )


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for NVIDIA GPUs")
@pytest.mark.skipif(
    not isinstance(triton_scoring._statistics_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set for all"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu(capability, dtype, with_entropy, chosen, tmp_path, monkeypatch):
    """What the interpreter cannot show: types, offsets beyond 2^31, the barrier before the overwrite."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"capability": capability, "dtype": dtype, "with_entropy": with_entropy, "chosen": chosen}
    for kernel in (triton_scoring._statistics_kernel, triton_scoring._gradient_kernel):
        built = compiled(kernel, **options)
        assert built.asm["cubin"]
        row_offset = next(line for line in built.asm["ttir"].splitlines() if "arith.muli" in line)
        assert ": i64" in row_offset
    assert "bar.sync" in built.asm["ptx"]


def test_the_public_function_stands_its_own_tests_on_the_kernels():
    """One rank and two, every dtype, chunk size and edge: the files as they are, the kernels interpreted."""
    files = [str(Path(__file__).with_name(name)) for name in ("test_vocab_parallel.py", "test_selected_log_probs.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
