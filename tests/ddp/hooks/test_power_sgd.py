"""PowerSGD, compared with a float64 single-process oracle."""

import math

import pytest
import torch

from phalanx.ddp.hooks import PowerSGDState, batched_powerSGD_hook, chain, fp16_compress_wrapper
from phalanx.ddp.hooks import powerSGD_hook as hook

from ..internals import GradBucket, orthogonalize
from .buckets import bucket_of, everywhere, flat_gradients, gradients, mean_of, on_threads, run

SHAPES = ((12, 8), (7,), (6, 3, 4))  # as matrices: 12 x 8, too small, 6 x 12
FIRST, STEPS = 2, 4


class Oracle:
    """The paper's algorithm 1 with error feedback, for one matrix on all ranks."""

    def __init__(self, q, size):
        self.q = q.double()
        self.held = [0.0] * size

    def step(self, matrices):
        """Return the approximation of the mean of the ranks' matrices."""
        full = [m.double() + held for m, held in zip(matrices, self.held, strict=True)]
        p, _ = torch.linalg.qr(mean_of([m @ self.q for m in full]))
        qs = [m.T @ p for m in full]
        self.held = [m - p @ q.T for m, q in zip(full, qs, strict=True)]
        self.q = mean_of(qs)
        return p @ self.q.T


def known(state, *qs):
    """Initialize the Q factors of a state."""
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in qs]).float()
    return state


def matrices_of(step, place, size):
    everyones = [gradients(rank, step, shapes=SHAPES)[place] for rank in range(size)]
    return [each.view(len(each), -1) for each in everyones]


@everywhere
def test_matches_the_papers_algorithm(group):
    size = group.size()
    generator = torch.Generator().manual_seed(5)
    qs = [torch.randn(m, 2, generator=generator) for m in (8, 12)]
    state = known(PowerSGDState(None, 2, FIRST, min_compression_rate=1), *qs)
    oracles = [Oracle(q, size) for q in qs]
    for step in range(FIRST + STEPS):
        result = run(hook, state, group, step, shapes=SHAPES)
        mean = mean_of(flat_gradients(size, step, shapes=SHAPES))
        if step >= FIRST:
            mean[:96] = oracles[0].step(matrices_of(step, 0, size)).view(-1)
            mean[103:] = oracles[1].step(matrices_of(step, 2, size)).view(-1)
        torch.testing.assert_close(result.double(), mean, rtol=1e-4, atol=1e-4)
    held = torch.cat([oracle.held[group.rank()].view(-1) for oracle in oracles])
    torch.testing.assert_close(state.error_dict[0].double(), held, rtol=1e-4, atol=1e-4)
    sent = 2 * (12 + 8) + 2 * (6 + 12) + 7
    assert state.compression_stats() == (175 / sent, STEPS * 175, STEPS * sent)


@everywhere
def test_same_result_as_torchs_hook_from_the_same_q(group):
    """Results differ from torch's only by the random Q of the first step.

    Residuals per rank differ from torch's, but their sum is the same.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as upstream

    generator = torch.Generator().manual_seed(5)
    qs = [torch.randn(m, 2, generator=generator) for m in (8, 12)]
    mine = known(PowerSGDState(None, 2, FIRST, min_compression_rate=1), *qs)
    theirs = upstream.PowerSGDState(group, 2, FIRST, min_compression_rate=1)
    theirs.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in qs])
    theirs.p_memory_dict[0] = torch.empty(2 * (12 + 6))
    for step in range(FIRST + STEPS):
        results = [
            run(each, state, group, step, shapes=SHAPES)
            for each, state in ((hook, mine), (upstream.powerSGD_hook, theirs))
        ]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@everywhere
def test_batched_hook_treats_the_bucket_as_a_square_matrix(group):
    size, shapes = group.size(), ((7, 4), (3,))
    q = torch.randn(6, 1, generator=torch.Generator().manual_seed(5))
    state, oracle = known(PowerSGDState(None, 1, FIRST), q), Oracle(q, size)
    for step in range(FIRST + STEPS):
        result = run(batched_powerSGD_hook, state, group, step, shapes=shapes)
        everyones = flat_gradients(size, step, shapes=shapes)
        expected = mean_of(everyones)
        if step >= FIRST:
            squares = [torch.cat([each, torch.zeros(5)]).view(6, 6) for each in everyones]
            expected = oracle.step(squares).view(-1)[:31]
            for held in oracle.held:
                held.view(-1)[31:] = 0  # padding
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


@on_threads
def test_low_rank_mean_is_exact(group):
    options = {"use_error_feedback": False, "warm_start": False, "min_compression_rate": 0}
    state = PowerSGDState(group, 2, 0, **options)
    left, right = gradients(0, shapes=((9, 2), (2, 5)))  # the same on every rank
    for scale in (1.0, 100.0):  # Q is random in every step
        mine = scale * (group.rank() + 1) * (left @ right)
        result = hook(state, bucket_of(mine)).wait().view(9, 5)
        expected = scale * (group.size() + 1) / 2 * (left @ right)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * scale)


@on_threads
def test_result_is_equal_on_all_ranks_and_depends_on_the_seed(group):
    results = []
    for seed in (0, 0, 1):
        state = PowerSGDState(group, 1, 2, random_seed=seed)
        state.iter = 2
        results.append(run(hook, state, group, shapes=SHAPES).clone())
        first = results[-1].clone()
        group.broadcast(first, root=0).wait()
        assert torch.equal(first, results[-1])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@on_threads
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_zero_gradients_stay_zero(group, epsilon):
    state = PowerSGDState(group, 2, 2, orthogonalization_epsilon=epsilon, min_compression_rate=0)
    state.iter = 2
    for _ in range(2):
        assert not hook(state, bucket_of(torch.zeros(4, 5))).wait().any()


@on_threads
def test_channels_last_gives_the_same_result(group):
    flat = flat_gradients(group.size(), shapes=((4, 3, 2, 2),))[group.rank()]
    plain = flat.view(4, 3, 2, 2)
    last = plain.contiguous(memory_format=torch.channels_last)
    storage = last.as_strided((48,), (1,)).clone()
    results = []
    for buffer, view in ((flat, plain), (storage, storage.as_strided(last.shape, last.stride()))):
        state = PowerSGDState(group, 1, 2, min_compression_rate=1)
        state.iter = 2
        hook(state, GradBucket(0, buffer, [view], [], True)).wait()
        results.append(view)
    torch.testing.assert_close(*results)


@on_threads
def test_changed_bucket_resets_the_state(group):
    state = PowerSGDState(group, 1, 2, min_compression_rate=1)
    state.iter = 2
    for rows in (8, 6):
        hook(state, bucket_of(torch.ones(rows, 5))).wait()
        assert state.error_dict[0].shape == (rows * 5,)
    other = PowerSGDState(group, 1, 2, min_compression_rate=1)
    other.iter = 3
    hook(other, bucket_of(torch.ones(6, 5))).wait()
    torch.testing.assert_close(state.error_dict[0], other.error_dict[0])


@on_threads
def test_fp16_factors(group):
    size = group.size()
    state = PowerSGDState(group, 4, 2, min_compression_rate=1)
    state.iter = 2
    shapes = ((4, 40),)  # rank four, so the approximation is exact
    result = run(chain(fp16_compress_wrapper, hook), state, group, shapes=shapes)
    expected = mean_of(flat_gradients(size, shapes=shapes))
    torch.testing.assert_close(result.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_orthogonalize_makes_columns_orthonormal(epsilon, dtype):
    matrix = torch.randn(30, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = matrix.clone().double()
    orthogonalize(matrix, epsilon)
    close = 0.05 if dtype == torch.bfloat16 else 1e-5
    matrix = matrix.double()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(4).double(), rtol=0, atol=close)
    torch.testing.assert_close(matrix @ (matrix.T @ before), before, rtol=0, atol=close * 10)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"matrix_approximation_rank": -1},
            "matrix_approximation_rank must be .* at least 1, got -1",
        ),
        ({"matrix_approximation_rank": 1.5}, "integer of at least 1, got 1.5"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter must be an integer of at least 2"),
        ({"min_compression_rate": -1}, "min_compression_rate must be at least 0"),
        ({"orthogonalization_epsilon": math.nan}, "orthogonalization_epsilon must be"),
    ],
)
def test_bad_settings_are_rejected(options, told):
    with pytest.raises(ValueError, match=told):
        PowerSGDState(None, **options)


def test_bad_input_is_rejected():
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got 0"):
        PowerSGDState(0)
    for each in (hook, batched_powerSGD_hook):
        with pytest.raises(ValueError, match=f"^{each.__name__} compresses .* complex64"):
            each(PowerSGDState(None), bucket_of(torch.zeros(2, dtype=torch.complex64)))
