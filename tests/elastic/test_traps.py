"""What would make results depend on the world size, or a failure pass unnoticed."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

from phalanx.elastic import ElasticRun
from phalanx.errors import GroupAborted, InvalidArgument, InvalidState, PeerLeft, RankMismatch
from phalanx.testing import RankFailures, ThreadRanks

from .training import torch_settings

four = ThreadRanks(4)


def on_threads(body, ranks=2):
    def inner(ctx):
        with torch_settings():
            return body(ctx.group("local"))

    return four.run(inner, ranks)


def small_run(group, module=None, **options):
    module = nn.Linear(2, 1) if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ElasticRun(module, optimizer, group=group, **{"micro_batches": 4, **options})


def make_steps(run, total, forward=None):
    for step in run.steps(total):
        for micro in step.micro_batches():
            output = None if forward is None else forward(micro)
            micro.backward(
                sum(p.sum() for p in run.model.parameters()) if output is None else output
            )
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


def same_at_any_world_size(body, sizes=(1, 2, 3)):
    """Run a body on several world sizes, and check that all ranks return the same."""
    results = {str(each) for size in sizes for each in on_threads(body, size)}
    assert len(results) == 1, results
    return results.pop()


# -- parameters ----------------------------------------------------------------------------


def test_an_optimizer_with_other_parameters_is_refused():
    def body(group):
        module, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*module.parameters(), temperature], lr=0.1)
        with pytest.raises(InvalidArgument, match=r"1 parameters that are not the model's.*\[3\]"):
            ElasticRun(module, optimizer, micro_batches=4, group=group)
        run = small_run(group, module)
        run.optimizers[0].add_param_group({"params": [temperature]})
        with pytest.raises(InvalidArgument, match="pass that as model"):
            make_steps(run, 1)

    on_threads(body, 1)


def test_a_state_that_replaces_parameters_is_refused():
    def body(group):
        run = small_run(group)
        run.model.load_state_dict(run.model.state_dict())
        with pytest.raises(InvalidState, match="Load without assign=True"):
            run.model.load_state_dict(nn.Linear(2, 1).state_dict(), assign=True)

    on_threads(body, 1)


def test_gradients_are_aligned_like_tensors_of_torch():
    """A dot product of a gradient may depend on its address, which must not depend on the ranks."""

    def body(group):
        module = nn.ParameterList([torch.ones(n) for n in (3, 5, 1, 7)])
        run = small_run(group, module)
        for step in run.steps(3):
            for micro in step.micro_batches():
                micro.backward(sum(p.sum() for p in module))
            assert all(p.grad.data_ptr() % 64 == 0 for p in module)
            assert all(p.grad.eq(1).all() for p in module)
            module.zero_grad()
        return step.number

    same_at_any_world_size(body)


def test_derivatives_by_parameters_may_be_taken_in_the_loop():
    """`torch.autograd.grad` accumulates nothing, and is no backward pass."""

    def body(group):
        run = small_run(group)

        def penalty(_):
            output = run.model(torch.ones(1, 2)).sum()
            gradients = torch.autograd.grad(output, run.model.parameters(), create_graph=True)
            return output + sum(gradient.square().sum() for gradient in gradients)

        make_steps(run, 2, penalty)

    on_threads(body)


def test_a_functional_sparse_gradient_is_refused_with_the_reason():
    def body(group):
        module = nn.ParameterList([torch.ones(5, 2)])
        run = small_run(group, module)
        index = torch.tensor([1])
        with pytest.raises(InvalidState, match="a gradient is sparse.*Use sparse=False"):
            make_steps(
                run, 1, lambda _: nn.functional.embedding(index, module[0], sparse=True).sum()
            )

    on_threads(body, 1)


# -- buffers -------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=not name.startswith("temporary"))


def test_signs_of_zeros_are_sent_to_all_ranks():
    def body(group):
        zero = torch.zeros(2) if group.rank() else -torch.zeros(2)
        module = Buffers(start=zero, first=torch.zeros(2))
        run = small_run(group, module, buffers={"first": "first"})

        def negate(micro):
            if micro.number == 0:
                module.first.neg_()

        make_steps(run, 1, negate)
        return [buffer.signbit().tolist() for buffer in (module.start, module.first)]

    assert same_at_any_world_size(body) == str([[True, True]] * 2)


def test_buffers_written_through_data_start_anew_in_every_micro_batch():
    def body(group):
        module = Buffers(count=torch.zeros((), dtype=torch.int64), mean=torch.zeros(()))
        run = small_run(group, module)

        def count(_):
            module.count.data += 1
            module.mean.data += 1

        make_steps(run, 2, count)
        return module.count.item(), module.mean.item()

    assert same_at_any_world_size(body) == str((2, 2.0))


def test_a_buffer_with_two_names_may_be_replaced_through_either():
    def body(group):
        module = Buffers(one=torch.zeros(()))
        module.register_buffer("two", module.one)
        run = small_run(group, module)

        def replace(micro):
            module.two = module.two + micro.number

        make_steps(run, 1, replace)
        assert module.one is module.two
        return module.one.item()

    assert same_at_any_world_size(body) == str(1.5)


def test_a_buffer_that_appears_in_a_micro_batch_is_refused():
    def body(group):
        module = Buffers(lazy=None)
        run = small_run(group, module)

        def create(_):
            module.lazy = torch.zeros(1)

        with pytest.raises(
            (InvalidState, GroupAborted), match="'lazy' was created in a micro-batch"
        ):
            make_steps(run, 1, create)

    on_threads(body)


def test_expanded_and_eight_bit_buffers_are_left_alone():
    def body(group):
        expanded = torch.ones(1).expand(4)
        module = Buffers(expanded=expanded, eight=torch.ones(3).to(torch.float8_e4m3fn))
        run = small_run(group, module)
        make_steps(run, 2)
        assert module.expanded is expanded

    on_threads(body)


def test_an_evaluation_leaves_no_trace_in_buffers():
    def body(group):
        module = Buffers(calls=torch.zeros(()))
        run = small_run(group, module)

        def count(batch):
            module.calls += 1
            return batch.sum()

        run.evaluate(count, run.loader([torch.ones(1)] * 5, 1))
        return module.calls.item()

    assert same_at_any_world_size(body) == str(0.0)


# -- checkpoints ---------------------------------------------------------------------------


def test_temporary_buffers_that_change_are_saved(tmp_path):
    def body(group):
        module = Buffers(temporary=torch.zeros(()))
        run = small_run(group, module)
        run.restore(tmp_path)

        def add(_):
            module.temporary += 1

        make_steps(run, 2, add)
        run.save()
        other = small_run(group, Buffers(temporary=torch.zeros(())))
        other.restore(tmp_path)
        assert other.hash() == run.hash()
        return other.model.temporary.item()

    assert on_threads(body, 2) == [2.0, 2.0]


def test_a_restore_clears_gradients_and_remembers_which_there_were(tmp_path):
    """`zero_grad(set_to_none=False)` leaves zeros, with which some optimizers still step."""

    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        make_steps(run, 1)
        run.model.weight.grad = torch.zeros(1, 2)
        run.save()
        run.model.weight.grad = torch.full((1, 2), torch.nan)
        run.model.bias.grad = torch.ones(1)
        run.restore(tmp_path)
        return run.model.weight.grad.tolist(), run.model.bias.grad

    assert on_threads(body, 1) == [([[0.0, 0.0]], None)]


def test_a_restore_rewinds_loaders_that_the_checkpoint_does_not_have(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        make_steps(run, 1)
        run.save()
        loader = run.loader([1, 2, 3], 1)
        loader._advance()
        assert run.restore(tmp_path) == 1
        return loader.next_loop

    assert on_threads(body, 1) == [0]


def test_code_after_a_restore_draws_what_code_after_the_step_would(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        for step in run.steps(2):
            for _ in range(2):
                for micro in step.micro_batches():
                    micro.backward(run.model.weight.sum())
            drawn = torch.rand(()).item()
        run.save()
        other = small_run(group)
        other.restore(tmp_path)
        return drawn == torch.rand(()).item()

    assert on_threads(body, 1) == [True]


def test_a_save_between_two_loops_of_a_step_is_refused(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        with pytest.raises(InvalidState, match="has had 1 loops .* the step before 2"):
            for step in run.steps(2):
                for loop in range(2):
                    for micro in step.micro_batches():
                        micro.backward(run.model.weight.sum())
                    if (step.number, loop) == (2, 0):
                        run.save()

    on_threads(body, 1)


def test_an_older_step_can_be_continued_after_later_ones_are_removed(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        for _ in range(3):
            make_steps(run, run.completed_steps + 1)
            run.save()
        run.restore(tmp_path, step=1)
        run.checkpoints.rewind(1)
        make_steps(run, 2)
        run.save()
        return run.checkpoints.steps()

    assert on_threads(body, 1) == [[1, 2]]


# -- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_weights_on_some_ranks_raise_on_all(ranks, backend):
    for error in ranks.run(weigh_on_rank_1, 2, args=(backend,), timeout=20):
        assert isinstance(error, RankMismatch)
        assert "ive all" in str(error) + "".join(getattr(error, "__notes__", []))


def weigh_on_rank_1(ctx, backend):
    with torch_settings():
        run = small_run(ctx.group(backend))
        try:
            for step in run.steps(1):
                for micro in step.micro_batches():
                    micro.backward(run.model.weight.sum(), weight=1.0 if ctx.rank else None)
        except RankMismatch as error:
            return error


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_in_the_last_backward_pass_reaches_all_ranks(ranks, backend):
    mine, theirs = ranks.run(raise_on_rank_0, 2, args=(backend,), timeout=20)
    assert isinstance(mine, ZeroDivisionError)
    assert isinstance(theirs, GroupAborted)
    assert "ZeroDivisionError: from a hook" in str(theirs)


def raise_on_rank_0(ctx, backend):
    def raise_late(gradient):
        if ctx.rank == 0 and place == [3, 1]:  # its last micro-batch
            raise ZeroDivisionError("from a hook")
        return gradient

    with torch_settings():
        module = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
        run = small_run(ctx.group(backend), module, bucket_cap_mb=0.1)
        module[0].weight.register_hook(raise_late)
        place = []
        try:
            for step in run.steps(3):
                for micro in step.micro_batches():
                    place[:] = step.number, micro.number
                    micro.backward(module(torch.ones(1, 300)).sum())
                run.optimizers[0].zero_grad()
        except (ZeroDivisionError, GroupAborted) as error:
            return error


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_left_the_group_is_named(ranks, backend):
    results = ranks.run(leave_on_rank_2, 3, args=(backend,), timeout=20)
    for error in results[:2]:
        assert isinstance(error, PeerLeft)
        assert error.left == (2,)


def leave_on_rank_2(ctx, backend):
    with torch_settings():
        group = ctx.group(backend)
        run = small_run(group)
        make_steps(run, 2)
        group.update_membership(ctx.rank != 2)
        try:
            if ctx.rank != 2:
                make_steps(run, 3)
        except PeerLeft as error:
            return error


def test_a_run_that_failed_does_not_disturb_another_on_the_same_module():
    def body(group):
        module = nn.Linear(2, 1)
        run = small_run(group, module)
        with pytest.raises(ZeroDivisionError):
            make_steps(run, 1, lambda _: 1 / 0)
        other = small_run(group, module)
        make_steps(other, 2)
        return other.hash()

    assert len({*on_threads(body)}) == 1


def test_a_closed_run_leaves_nothing_on_the_module():
    def body(group):
        module = nn.Linear(2, 1)
        run = small_run(group, module)
        make_steps(run, 2)
        run.close()
        weak = weakref.ref(run._reducer)
        del run
        gc.collect()
        assert weak() is None
        module.weight.sum().backward()
        assert module.weight.grad.tolist() == [[1.0, 1.0]]

    on_threads(body, 1)


def test_ranks_with_other_buffers_or_options_do_not_start():
    def other_shape(group):
        module = Buffers(state=torch.zeros(2 + group.rank()))
        with pytest.raises(RankMismatch, match="ranks have different buffers"):
            small_run(group, module)

    def other_cap(group):
        with pytest.raises(RankMismatch, match="disagree on bucket_cap_mb: rank 0 says 1, rank 1"):
            small_run(group, bucket_cap_mb=1 + group.rank())

    on_threads(other_shape)
    on_threads(other_cap)


def test_a_caught_exception_of_a_backward_pass_fails_the_step():
    """Its gradients are incomplete, and with one rank nobody would notice."""

    def body(group):
        run = small_run(group)

        def refuse(_):
            raise RuntimeError("out of memory")

        for step in run.steps(1):
            for micro in step.micro_batches():
                loss = run.model.weight.sum()
                if micro.number == 3:
                    loss.register_hook(refuse)
                with suppress(RuntimeError):
                    micro.backward(loss)

    for ranks in (1, 2):
        with pytest.raises(RankFailures, match="raised RuntimeError: out of memory, and the loop"):
            on_threads(body, ranks)


def test_optimizer_state_keeps_its_dtype_in_a_restore(tmp_path):
    """torch casts it to that of the parameter."""

    def body(group):
        def train(run, total):
            make_steps(run, total)
            return run.hash()

        def make():
            module = nn.Linear(3, 2).bfloat16()
            nn.init.constant_(module.weight, 0.3)
            nn.init.constant_(module.bias, 0.2)
            optimizer = torch.optim.NAdam(module.parameters(), lr=0.1)
            return ElasticRun(module, optimizer, group=group, micro_batches=4)

        expected = train(make(), 8)
        first, second = make(), make()
        first.restore(tmp_path)
        train(first, 3)
        first.save()
        assert second.restore(tmp_path) == 3
        assert train(second, 8) == expected

    on_threads(body, 1)


def test_parameter_groups_that_were_added_are_restored(tmp_path):
    def body(group):
        def make():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9)
            return ElasticRun(module, optimizer, group=group, micro_batches=4)

        run = make()
        run.optimizers[0].add_param_group({"params": run.model[1].parameters(), "lr": 0.01})
        run.restore(tmp_path)
        make_steps(run, 2)
        run.save()
        other = make()
        other.restore(tmp_path)
        assert [each["lr"] for each in other.optimizers[0].param_groups] == [0.1, 0.01]
        assert other.hash() == run.hash()

    on_threads(body, 1)


def test_rewind_removes_the_steps_after_the_restored_one(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        for total in (1, 2, 3):
            make_steps(run, total)
            run.save()
        assert run.restore(tmp_path, step=1, rewind=True) == 1
        assert run.checkpoints.steps() == [1]
        with pytest.raises(InvalidArgument, match="rewind=True needs step="):
            run.restore(tmp_path, rewind=True)

    on_threads(body, 2)
