"""Stateless hooks against their formulas: all-reduce, noop, compression, chains."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from phalanx.ddp import hooks
from phalanx.ddp.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    chain,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from phalanx.errors import InvalidArgument, InvalidState, RankMismatch
from phalanx.testing import over_groups

from ..internals import GradBucket
from .buckets import (
    assert_near,
    bucket_of,
    everywhere,
    flat_gradients,
    gradients,
    mean_of,
    on_threads,
    run,
)

HOOKS = sorted(
    {each for each in vars(hooks) if each.endswith("_hook")} - {"register_ddp_comm_hook"}
)
HALVES = {
    torch.float16: (fp16_compress_hook, fp16_compress_wrapper),
    torch.bfloat16: (bf16_compress_hook, bf16_compress_wrapper),
}


@everywhere
def test_allreduce_hook_computes_the_mean(group):
    mean = mean_of(flat_gradients(group.size()))
    for state in (None, group):  # the bucket's group, or one that is given
        assert_near(run(allreduce_hook, state, group), mean)


@everywhere
def test_result_is_in_the_bucket_buffer(group):
    for hook in (allreduce_hook, noop_hook, fp16_compress_hook):
        bucket = bucket_of(*gradients(group.rank()), group=group)
        before = bucket.buffer()
        assert hook(None, bucket).wait() is before
        assert bucket.buffer() is before


@on_threads
def test_noop_hook_keeps_the_local_gradient(group):
    mine = flat_gradients(group.size())[group.rank()]
    assert torch.equal(run(noop_hook, None, group), mine)


@everywhere
def test_compressed_gradients_are_divided_before_summation(group):
    size = group.size()
    for dtype, (hook, _) in HALVES.items():
        expected = sum((each.to(dtype) / size).double() for each in flat_gradients(size))
        result = run(hook, None, group)
        assert result.dtype == torch.float32
        eps = torch.finfo(dtype).eps  # the sum is rounded once or after each addition
        torch.testing.assert_close(result.double(), expected, rtol=eps, atol=2 * eps)


@on_threads
def test_large_fp16_values_do_not_overflow(group):
    bucket = bucket_of(torch.full((3,), 60000.0), group=group)
    assert fp16_compress_hook(None, bucket).wait().tolist() == [60000.0] * 3


@everywhere
def test_wrapper_around_allreduce_equals_the_compress_hook(group):
    for hook, wrapper in HALVES.values():
        for same in (wrapper(allreduce_hook), chain(wrapper, allreduce_hook)):
            assert torch.equal(run(same, None, group), run(hook, None, group))


@on_threads
def test_wrapped_hook_sees_fp16_and_its_caller_float32(group):
    seen = []

    def looking(state, bucket):
        seen.append({bucket.buffer().dtype, *(each.dtype for each in bucket.gradients())})
        return allreduce_hook(state, bucket)

    def outer(hook):
        def wrapped(state, bucket):
            return hook(state, bucket).then(
                lambda done: (seen.append({bucket.buffer().dtype}), done.value())[1]
            )

        return wrapped

    run(chain(outer, fp16_compress_wrapper, looking), None, group)
    assert seen == [{torch.float16}, {torch.float32}]


@on_threads
def test_chain_runs_left_to_right_and_back(group):
    steps = []

    def named(name):
        def wrapper(hook):
            def wrapped(state, bucket):
                steps.append(f"{name} before")
                return hook(state, bucket).then(
                    lambda done: (steps.append(f"{name} after"), done.value())[1]
                )

            return wrapped

        return wrapper

    run(chain(named("a"), named("b"), noop_hook), None, group)
    assert steps == ["a before", "b before", "b after", "a after"]
    assert chain(noop_hook) is noop_hook


def test_bad_chains_are_rejected():
    with pytest.raises(ValueError, match="at least one hook"):
        chain()
    with pytest.raises(TypeError, match="must be callable, got 7"):
        chain(fp16_compress_wrapper, 7)
    with pytest.raises(TypeError, match="allreduce_hook is not a hook wrapper"):
        chain(allreduce_hook, noop_hook)
    with pytest.raises(TypeError, match="must return a hook, got None"):
        chain(lambda _: None, noop_hook)


@everywhere
def test_sparse_gradients_are_averaged(group):
    rank, size = group.rank(), group.size()
    mine = torch.zeros(size + 1)
    mine[rank], mine[size] = size, 1.0
    mine = mine.to_sparse()
    bucket = GradBucket(0, mine, [mine], [], True, group=group)
    assert allreduce_hook(None, bucket).wait().to_dense().tolist() == [1.0] * (size + 1)


@on_threads
def test_several_buckets_in_flight(group):
    size = group.size()
    buckets = [bucket_of(*gradients(group.rank(), i), index=i, group=group) for i in range(5)]
    pending = [fp16_compress_hook(None, bucket) for bucket in buckets]
    for i, future in reversed(list(enumerate(pending))):
        expected = mean_of(flat_gradients(size, i))
        torch.testing.assert_close(future.wait().double(), expected, rtol=1e-2, atol=1e-2)


@over_groups(backends=("local", "shm"), sizes=(2,))
def test_error_class_survives_chained_futures(group):
    bucket = bucket_of(torch.zeros(2 + group.rank()), group=group)
    with pytest.raises(RankMismatch):
        chain(fp16_compress_wrapper, allreduce_hook)(None, bucket).wait()


def test_missing_group_is_an_error():
    with pytest.raises(InvalidState, match="pass process_group"):
        allreduce_hook(None, bucket_of(torch.zeros(2)))


def test_bad_process_group_is_rejected():
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got 3"):
        allreduce_hook(3, bucket_of(torch.zeros(2)))


@pytest.mark.parametrize("name", HOOKS)
def test_hook_signatures_pass_torchs_check(name):
    signature = inspect.signature(getattr(hooks, name))
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == Future[torch.Tensor]
    assert list(signature.parameters)[1] == "bucket"


@pytest.mark.parametrize("kind", ["complex64", "sparse float32"])
def test_incompressible_buckets_are_rejected(kind):
    values = torch.eye(2).to_sparse() if "sparse" in kind else torch.zeros(2, dtype=torch.complex64)
    told = rf"fp16_compress_wrapper\(allreduce_hook\) compresses dense .* bucket 0 is {kind}"
    with pytest.raises(InvalidArgument, match=told):
        fp16_compress_hook(None, GradBucket(0, values, [values], [], True))
