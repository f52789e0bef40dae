"""An elastic run: checkpoints, hashes, fingerprints, evaluation, buffers, generators."""

import contextlib
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from phalanx.checkpoint import CheckpointManager
from phalanx.elastic import ElasticRun
from phalanx.errors import InvalidArgument, InvalidState, InvalidType, MissingKeys, RankMismatch
from phalanx.launch.cli import main
from phalanx.testing import ThreadRanks

from .training import Samples, make_run, torch_settings, train_on_rank

four = ThreadRanks(4)


def on_threads(body, ranks=3, **options):
    def inner(ctx):
        with torch_settings():
            return body(ctx.group("local"))

    return four.run(inner, ranks, **options)


def small_run(group, module=None, **options):
    module = module or nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ElasticRun(module, optimizer, group=group, **{"micro_batches": 4, **options})


def make_steps(run, steps, loss=None):
    for step in run.steps(steps):
        for micro in step.micro_batches():
            micro.backward(loss(micro) if loss else run.model.weight.sum())
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


# -- checkpoints ---------------------------------------------------------------------------


def test_restore_returns_the_number_of_steps_and_steps_continue_from_there(tmp_path):
    def body(group):
        first = small_run(group)
        assert first.restore(tmp_path) == 0
        make_steps(first, 5)
        first.save()
        second = small_run(group)
        assert second.restore(tmp_path) == second.completed_steps == 5
        assert second.hash() == first.hash()
        assert [step.number for step in _looped(second, 7)] == [6, 7]
        assert [step.number for step in second.steps(7)] == []
        return second.hash() != first.hash()

    assert on_threads(body) == [True] * 3


def _looped(run, total):
    for step in run.steps(total):
        for micro in step.micro_batches():
            micro.backward(run.model.weight.sum())
        yield step


def test_save_every_saves_multiples_once_and_keeps_the_last(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path, keep_last=2)
        saved = []
        for step in _looped(run, 7):
            saved.append((step.number, run.save_every(3), run.save_every(3)))
        return saved

    expected = [(n, n % 3 == 0, False) for n in range(1, 8)]
    assert on_threads(body, 2) == [expected] * 2
    assert CheckpointManager(tmp_path).steps() == [3, 6]


def test_a_checkpoint_of_an_older_step_can_be_chosen(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        hashes = {}
        for step in _looped(run, 3):
            run.save()
            hashes[step.number] = run.hash()
        other = small_run(group)
        assert other.restore(tmp_path, step=2) == 2
        return other.hash() == hashes[2]

    assert on_threads(body, 1) == [True]


class _Stopped(Exception):
    pass


def _train_in_epochs(group, directory, *, saves, stop_at=None):
    """Train with a call of steps() per epoch, and more in between; return the hash."""
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    held = optimizer.param_groups[0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    module = nn.ModuleList([first, second])
    run = ElasticRun(
        module, optimizer, micro_batches=4, group=group, state={"scheduler": scheduler}
    )
    with contextlib.closing(run):
        run.restore(directory)
        for epoch in range(3):
            for step in run.steps(4 * (epoch + 1)):
                for micro in step.micro_batches():
                    loss = (first.weight**2).sum() + (second.weight * micro.number).sum()
                    micro.backward(loss)
                optimizer.step()
                module.zero_grad()  # also of what the optimizer gets later
                held["weight_decay"] = step.number / 100  # of the group that the optimizer steps
                if saves == "every third step":
                    run.save_every(3)
                elif saves == "every fourth step":
                    run.save_every(4)
                if step.number == stop_at:
                    raise _Stopped
            if saves == "before the scheduler":
                run.save_every(4)
            scheduler.step()
            if epoch == 0:
                optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.05})
            if saves == "after the scheduler":
                run.save()
        return run.hash()


@pytest.mark.parametrize("stop_at", [3, 5, 9, 11])
@pytest.mark.parametrize(
    "saves",
    ["every third step", "every fourth step", "before the scheduler", "after the scheduler"],
)
def test_what_a_script_does_between_calls_of_steps_counts_once(tmp_path, saves, stop_at):
    """A restored run has the bits of one that was not stopped, wherever it was saved."""

    def body(group):
        torch.manual_seed(0)
        expected = _train_in_epochs(group, tmp_path / "whole", saves=saves)
        torch.manual_seed(0)
        with pytest.raises(_Stopped):
            _train_in_epochs(group, tmp_path / "stopped", saves=saves, stop_at=stop_at)
        torch.manual_seed(0)
        assert _train_in_epochs(group, tmp_path / "stopped", saves=saves) == expected
        torch.manual_seed(0)  # and again, now that all is done
        assert _train_in_epochs(group, tmp_path / "stopped", saves=saves) == expected
        return True

    assert on_threads(body, 1) == [True]


class _EarlyStopping:
    def __init__(self):
        self.best, self.bad_epochs = float("inf"), 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)

    def update(self, loss):
        self.bad_epochs = 0 if loss < self.best else self.bad_epochs + 1
        self.best = min(self.best, loss)
        return self.bad_epochs == 0


def _gradual_unfreezing(run, epoch, stopping, loss):
    if epoch < 2:
        layer = run.model[epoch + 1].requires_grad_(True)
        run.optimizers[0].add_param_group({"params": list(layer.parameters()), "lr": 0.01})
    run.model[0].train(epoch % 2 == 0)
    run.save()


def _save_if_best(run, epoch, stopping, loss):
    is_best = stopping.update(loss)
    if is_best:
        run.save()
    run.state["scheduler"].step()


def _step_and_save_if_best(run, epoch, stopping, loss):
    run.state["scheduler"].step()
    if stopping.update(loss):
        run.save()


def _two_saves(run, epoch, stopping, loss):
    run.save_every(4)
    run.state["scheduler"].step()
    run.optimizers[0].param_groups[0]["momentum"] *= 0.9
    run.save()


def _stop_early(run, epoch, stopping, loss):
    stopping.update(-loss)  # never better than the first one
    run.state["scheduler"].step()
    run.save()


@pytest.mark.parametrize("stop_at", [6, 10, 14])
@pytest.mark.parametrize(
    "between",
    [_gradual_unfreezing, _save_if_best, _step_and_save_if_best, _two_saves, _stop_early],
)
def test_a_restored_run_repeats_what_is_between_its_epochs(tmp_path, between, stop_at):
    def train(group, directory, stop_at=None):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        if between is _gradual_unfreezing:
            model[1:].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9)
        cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.02, step_size_up=3)
        stopping = _EarlyStopping()
        state = {"scheduler": cyclic, "stopping": stopping}
        run = ElasticRun(model, optimizer, micro_batches=2, group=group, state=state)
        data = run.loader([torch.ones(2), torch.zeros(2)], 1, shuffle=False)
        with contextlib.closing(run):
            run.restore(directory)
            for epoch in range(5):
                for step in run.steps(4 * (epoch + 1)):
                    for micro in step.micro_batches():
                        noise = torch.randn(2)
                        micro.backward((model(noise) ** 2).sum())
                    optimizer.step()
                    model.zero_grad()
                    if step.number == stop_at:
                        raise _Stopped
                between(run, epoch, stopping, run.evaluate(lambda x: (model(x) ** 2).sum(), data))
                if stopping.bad_epochs == 4:
                    break
            flags = [p.requires_grad for p in model.parameters()], model[0].training
            return run.hash(), run.completed_steps, flags, float(torch.rand(()))

    def body(group):
        expected = train(group, tmp_path / "whole")
        with pytest.raises(_Stopped):
            train(group, tmp_path / "stopped", stop_at)
        assert train(group, tmp_path / "stopped") == expected
        return True

    assert on_threads(body, 1) == [True]


def test_a_restored_run_evaluates_before_its_first_step(tmp_path):
    """The result is that of the restored model, and not that of the saved run's beginning."""

    def train(group, total):
        module = nn.Linear(2, 1)
        run = small_run(group, module)
        data = run.loader([torch.ones(2)] * 4, 2, shuffle=False)
        measure = lambda batch: module(batch).sum()  # noqa: E731
        with contextlib.closing(run):
            run.restore(tmp_path)
            first = run.evaluate(measure, data)
            make_steps(run, total)
            run.save()
            return first, run.evaluate(measure, data)

    def body(group):
        before, after = train(group, 3)
        again, _ = train(group, 5)
        assert before != after
        return again == after

    assert on_threads(body, 2) == [True] * 2


class _Sharpness(torch.optim.Optimizer):
    """Steps through another optimizer, which has the same list of groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


def test_an_optimizer_that_shares_its_groups_with_another_one_still_does(tmp_path):
    def body(group):
        module = nn.Linear(2, 1)
        optimizer = _Sharpness(module.parameters())
        run = ElasticRun(module, optimizer, micro_batches=4, group=group)
        run.restore(tmp_path)
        make_steps(run, 2)
        run.save()
        run.restore(tmp_path)
        optimizer.param_groups[0]["lr"] = 0.0
        before = module.weight.clone()
        make_steps(run, 3)
        return torch.equal(module.weight, before)

    assert on_threads(body, 1) == [True]


def test_saves_that_a_restored_run_has_passed_are_not_made_again(tmp_path):
    def body(group):
        run = small_run(group)
        run.restore(tmp_path)
        make_steps(run, 2)
        make_steps(run, 5)
        run.save()
        expected = run.hash()
        other = small_run(group)
        other.restore(tmp_path)
        make_steps(other, 2)
        with torch.no_grad():
            other.model.weight.zero_()  # as code after the first call might
        other.save()
        assert not other.save_every(1)
        make_steps(other, 5)
        assert other.hash() == expected
        third = small_run(group)
        third.restore(tmp_path)
        return third.hash() == expected

    assert on_threads(body, 2) == [True] * 2


def test_diff_of_two_runs_tells_whether_they_are_the_same(ranks, tmp_path):
    """`phalanx checkpoint diff` compares bytes: of equal runs at different world sizes, none."""
    for name, size, steps in (("one", 1, 4), ("three", 3, 4), ("longer", 2, 5)):
        kwargs = {"directory": tmp_path / name}
        ranks.run(train_on_rank, size, args=("lstm", steps, "shm"), kwargs=kwargs)
    one, three, longer = (str(tmp_path / name) for name in ("one", "three", "longer"))
    same = CliRunner().invoke(main, ["checkpoint", "diff", one, three])
    assert same.exit_code == 0, same.output
    assert "0 differ" in same.output
    other = CliRunner().invoke(main, ["checkpoint", "diff", one, longer])
    assert other.exit_code == 1
    first = next(line for line in other.output.splitlines() if line.startswith("changed"))
    assert "model.embed.weight" in first
    assert "values of float32[30, 12]" in first


def test_the_hash_depends_on_every_part_of_the_state():
    def body(group):
        run = small_run(group, nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)))
        seen = {run.hash()}
        assert run.hash() in seen
        with torch.no_grad():
            run.model[0].weight.view(torch.int32)[0, 0] ^= 1
        seen.add(run.hash())
        run.model[1].running_mean.neg_()  # -0.0 instead of 0.0
        seen.add(run.hash())
        run.optimizers[0].param_groups[0]["lr"] = 0.2
        seen.add(run.hash())
        loader = run.loader([1, 2], 1)
        seen.add(run.hash())
        loader._advance()
        seen.add(run.hash())
        return len(seen)

    assert on_threads(body, 1) == [6]


def test_a_loader_made_after_a_restore_continues_where_it_was(tmp_path):
    dataset = [torch.tensor([float(i)]) for i in range(10)]

    def batches(run, loader, total):
        seen = []
        for step in run.steps(total):
            for micro in step.micro_batches(loader):
                seen.append((step.number, micro.number, micro.batch.flatten().tolist()))
                micro.backward(run.model.weight.sum())
        return seen

    def body(group):
        whole = small_run(group)
        expected = batches(whole, whole.loader(dataset, 2), 4)
        first = small_run(group)
        loader = first.loader(dataset, 2)
        first.restore(tmp_path)
        seen = batches(first, loader, 2)
        first.save()
        second = small_run(group)
        second.restore(tmp_path)
        return seen + batches(second, second.loader(dataset, 2), 4) == expected

    assert on_threads(body, 2) == [True, True]


def test_a_restore_that_cannot_give_the_same_bits_says_why(tmp_path):
    def save(group):
        run = small_run(group)
        run.loader([1, 2, 3], 1)
        run.restore(tmp_path)
        make_steps(run, 1)
        run.save()

    def restore(group, **options):
        run = small_run(group, seed=1, threads=2, **options)
        run.loader([1, 2, 3, 4], 2)
        run.restore(tmp_path)

    on_threads(save, 1)
    with pytest.warns(RuntimeWarning, match="will not be bitwise identical") as caught:
        on_threads(restore, 1)
    text = str(caught[0].message)
    for item in ("seed: 0 saved, 1 now", "threads: 1 saved, 2 now", "batch size: 1 saved, 2 now"):
        assert item in text
    assert caught[0].filename == __file__

    def strictly(group):
        with pytest.raises(InvalidState, match=r"threads: 1 saved, 2 now.*Use the saved settings"):
            restore(group, strict=True)

    on_threads(strictly, 1)


def test_a_difference_on_one_rank_raises_on_all(tmp_path):
    """A strict restore must not leave the other ranks waiting in a load."""

    def save_with_loader(group):
        run = small_run(group)
        run.loader([1, 2], 1)
        run.restore(tmp_path)
        make_steps(run, 1)
        run.save()

    on_threads(save_with_loader, 2)

    def check(group):
        if group.rank():
            with pytest.raises(InvalidState, match="samples per epoch: 2 saved, 3 now"):
                _strict_restore(group, [1, 2, 3], tmp_path)
        else:
            with pytest.raises(InvalidState, match=r"saved, 3 now \(rank 1\)"):
                _strict_restore(group, [1, 2], tmp_path)

    on_threads(check, 2)


def _strict_restore(group, dataset, path):
    run = small_run(group, strict=True)
    run.loader(dataset, 1)
    run.restore(path)


def test_ranks_with_different_fingerprints_do_not_start(monkeypatch):
    from phalanx.elastic import _run

    fingerprint = _run.current_fingerprint

    def body(group):
        rank = group.rank()
        ranks_of_threads[threading.get_ident()] = rank
        with pytest.raises(RankMismatch, match="disagree on CPU capability: rank 0 says .*OLD"):
            small_run(group)

    ranks_of_threads = {}

    def patched(device):
        found = fingerprint(device)
        if ranks_of_threads[threading.get_ident()] == 1:
            found["CPU capability"] = "OLD"
        return found

    monkeypatch.setattr(_run, "current_fingerprint", patched)
    on_threads(body, 2)


def test_a_directory_without_an_elastic_run_is_named(tmp_path):
    def body(group):
        CheckpointManager(tmp_path, group=group).save(3, {"model": {}})
        with pytest.raises(MissingKeys, match="elastic"):
            small_run(group).restore(tmp_path)

    on_threads(body, 1)


# -- evaluation ----------------------------------------------------------------------------


def evaluate(group):
    module = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    run = ElasticRun(module, torch.optim.SGD(module.parameters()), micro_batches=4, group=group)
    inputs = torch.randn(23, 8, generator=torch.Generator().manual_seed(1))
    loader = run.loader(torch.utils.data.TensorDataset(inputs, inputs.sum(1) > 0), 5)
    module[1].eval()
    before = torch.get_rng_state(), random.getstate()

    def measure(batch):
        assert not module.training
        assert not torch.is_grad_enabled()
        x, y = batch
        output = module(x)
        return {"loss": cross_entropy(output, y.long()), "outputs": output.mean(0), "count": 1}

    result = run.evaluate(measure, loader)
    assert (module.training, module[1].training) == (True, False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    module.eval()
    exact = cross_entropy(module(inputs), (inputs.sum(1) > 0).long()).item()
    assert result["loss"] == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(result["outputs"], module(inputs).mean(0).double().detach())
    assert result["count"] == 1
    single = run.evaluate(lambda batch: batch[0].mean(), loader)
    assert isinstance(single, float)
    return result["loss"].hex(), result["outputs"].tolist(), single.hex()


def evaluate_on_rank(ctx):
    with torch_settings():
        return evaluate(ctx.group("shm"))


def test_an_evaluation_has_the_same_bits_at_any_world_size(ranks):
    (alone,) = ranks.run(evaluate_on_rank, 1)
    for size in (2, 3, 4):
        assert ranks.run(evaluate_on_rank, size) == [alone] * size


def draw_in_evaluation(ctx, workers):
    with torch_settings():
        run = small_run(ctx.group("shm"))
        loader = run.loader([torch.zeros(1)] * 12, 2, num_workers=workers)
        return run.evaluate(lambda _: torch.rand(()), loader)


def test_random_numbers_in_an_evaluation_belong_to_its_batches(ranks):
    results = {
        value
        for size, workers in ((1, 0), (2, 2), (3, 0))
        for value in ranks.run(draw_in_evaluation, size, args=(workers,))
    }
    assert len(results) == 1


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda batch: batch.flatten(), r"the same shape for every batch; got \[1\] and \[2\]"),
        (lambda batch: {str(len(batch)): 1.0}, "the same names for every batch"),
        (lambda _: "text", "fn must return numbers, tensors or a dict of them, got str"),
        (lambda _: {"": 1.0}, "names of results must be strings that are not empty"),
        (None, "evaluate takes a function and a loader of run.loader"),
    ],
)
def test_an_evaluation_that_cannot_be_averaged_says_so(fn, said):
    def body(group):
        run = small_run(group)
        with pytest.raises((InvalidState, InvalidType), match=said):
            run.evaluate(fn, run.loader([torch.zeros(1)] * 3, 2))

    on_threads(body, 2)


def test_an_evaluation_on_more_ranks_than_batches():
    def body(group):
        run = small_run(group)
        return run.evaluate(lambda batch: batch.float().mean(), run.loader([1.0, 2.0, 6.0], 2))

    assert on_threads(body, 4) == [3.0] * 4


# -- buffers -------------------------------------------------------------------------------


class Counting(nn.Module):
    """A module with buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("constant", torch.tensor([1 / 3, torch.finfo(torch.float32).min]))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("chosen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shared", self.mean)

    def forward(self, number):
        assert self.mean.tolist() == self.started_with, "a micro-batch saw what another left"
        self.mean += number + 1
        self.replaced = torch.tensor(float(number))
        self.count += number + 1
        self.chosen.fill_(number + 10)
        return self.weight.sum() * (number + 1)


def test_buffers_are_the_mean_of_the_micro_batches_or_those_of_the_first():
    def body(group):
        module = Counting()
        run = small_run(group, module, micro_batches=6, buffers={"chosen": "first"})
        before = module.constant.clone(), module.replaced, module.mean
        for step in run.steps(2):
            module.started_with = module.mean.tolist()
            for micro in step.micro_batches():
                micro.backward(module(micro.number))
        assert torch.equal(module.constant.view(torch.int32), before[0].view(torch.int32))
        assert module.replaced is before[1]
        assert module.mean is module.shared is before[2]
        assert module.mean.tolist() == [7.0] * 3  # two steps of the mean of 1 to 6
        assert module.replaced.item() == 2.5
        assert module.count.item() == 2
        assert module.chosen.item() == 10
        return run.hash()

    hashes = {digest for size in (1, 2, 4) for digest in on_threads(body, size)}
    assert len(hashes) == 1


def test_complex_buffers_can_be_averaged_and_integers_cannot():
    class Complex(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("phase", torch.tensor([complex(-0.0, 1), 3j]))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def body(group):
        module = Complex()
        run = small_run(group, module, micro_batches=6, buffers={"phase": "mean"})
        for step in run.steps(2):
            for micro in step.micro_batches():
                module.phase[0] += complex(micro.number, 1 / 3)
                micro.backward(module.weight.sum())
        with pytest.raises(InvalidArgument, match="'count' is torch.int64, which has no mean"):
            small_run(group, Complex(), buffers={"count": "mean"})
        return module.phase.tolist()

    results = {str(each) for size in (1, 2, 4) for each in on_threads(body, size)}
    assert len(results) == 1
    assert eval(results.pop())[1] == 3j  # noqa: S307


def test_a_buffer_that_changes_its_shape_is_refused():
    class Growing(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("cache", torch.zeros(1))

        def forward(self, _):
            self.cache = torch.zeros(2)
            return self.weight.sum()

    def body(group):
        run = small_run(group, Growing())
        with pytest.raises(InvalidState, match=r"'cache' was torch.float32\[1\].*\[2\] now"):
            make_steps(run, 1, loss=lambda _: run.model(None))

    on_threads(body, 1)


# -- generators and threads ----------------------------------------------------------------


def draws(ctx):
    """What code draws in micro-batches, after them and between steps."""
    with torch_settings():
        run = small_run(ctx.group("shm"), seed=4)
        inside, after = {}, []
        for step in run.steps(3):
            after.append(torch.rand(()).item())
            for micro in step.micro_batches():
                inside[step.number, micro.number] = (
                    torch.rand(()).item(),
                    random.random(),
                    float(np.random.rand()),
                )
                micro.backward(run.model.weight.sum())
            after.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
            for _ in range(ctx.rank):
                torch.rand(7)  # what a rank draws by itself leaves no trace
        return inside, after


def test_random_numbers_belong_to_micro_batches_and_steps(ranks):
    ((inside, after),) = ranks.run(draws, 1)
    assert len({*inside.values()}) == len(inside) == 12
    assert len({*after}) == 6
    parts = ranks.run(draws, 3)
    assert {place: values for part, _ in parts for place, values in part.items()} == inside
    assert all(each == after for _, each in parts)


def test_a_run_sets_its_number_of_threads_and_asks_for_deterministic_algorithms():
    def body(group):
        torch.set_num_threads(2)
        small_run(group)
        assert torch.get_num_threads() == 1
        small_run(group, threads=2)
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        small_run(group, strict=True)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()

    on_threads(body, 1)


# -- gradients -----------------------------------------------------------------------------


def test_reentrant_checkpointing_that_begins_in_the_middle_of_a_run_is_refused():
    """The first steps fold gradients early, so a second accumulation comes too late."""

    def body(group):
        module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
        run = small_run(group, module)

        def loss(_):
            x = torch.ones(2, 300, requires_grad=True)
            if run.completed_steps < 3:
                return module(x).sum()
            # Autograd reaches what was computed last first.
            nested = checkpoint(module[1], x, use_reentrant=True)
            return (nested + module[1](module[0](x))).sum()

        with pytest.raises(InvalidState, match=r"'1.weight'.*use_reentrant=False"):
            for step in run.steps(5):
                for micro in step.micro_batches():
                    micro.backward(loss(micro))
                run.optimizers[0].zero_grad()
        return run.completed_steps

    assert on_threads(body, 1) == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_the_recursive_sum_of_those_of_the_micro_batches(ranks, dtype):
    """Against the definition: the tree over micro-batches, and a sum in float64."""
    for size in (1, 3):
        for gradient, by_number in ranks.run(collect_gradients, size, args=(dtype,)):
            leaves = [by_number[number] for number in sorted(by_number)]
            assert torch.equal(gradient, recursive_sum(leaves) / len(leaves))
            exact = torch.stack(leaves).double().mean(0)
            scale = torch.stack(leaves).double().abs().sum(0)
            bound = 4 * torch.finfo(dtype).eps * scale
            assert ((gradient.double() - exact).abs() <= bound).all()


def recursive_sum(values):
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    return recursive_sum(values[:middle]) + recursive_sum(values[middle:])


def collect_gradients(ctx, dtype):
    with torch_settings():
        module = nn.Linear(70, 90, bias=False).to(dtype)
        run = small_run(ctx.group("shm"), module, micro_batches=5)
        leaves, now = {}, 0
        module.weight.register_hook(lambda gradient: leaves.update({now: gradient.clone()}))
        for step in run.steps(3):
            for micro in step.micro_batches():
                now = micro.number
                micro.backward((module(torch.randn(4, 70, dtype=dtype)) ** 3).float().sum())
            gradient = module.weight.grad.clone()
            module.zero_grad()
        everything = [torch.zeros(5, 90, 70, dtype=dtype) for _ in range(ctx.size)]
        mine = torch.zeros(5, 90, 70, dtype=dtype)
        for number, leaf in leaves.items():
            mine[number] = leaf
        run.group.allgather([everything], [mine]).wait()
        return gradient, {i: sum(rank[i] for rank in everything) for i in range(5)}


def test_no_warning_is_issued_for_an_ordinary_run():
    def body(group):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = make_run(group, "lstm", draws=False)
            loader = run.loader(Samples("lstm", augment=False), 3)
            for step in run.steps(2):
                for micro in step.micro_batches(loader):
                    _, inputs, labels = micro.batch
                    micro.backward(cross_entropy(run.model(inputs), labels))

    on_threads(body, 1)


def count_calls_before_the_last_gradient(ctx):
    with torch_settings():
        module = nn.Sequential(*(nn.Linear(200, 200) for _ in range(5)))
        group = ctx.group("shm")
        run = small_run(group, module, bucket_cap_mb=0.1)
        counts = {}

        def count(_):  # the gradient of the first layer arrives last
            counts[place] = len(group.records())

        module[0].weight.register_hook(count)
        for step in run.steps(3):
            for micro in step.micro_batches():
                place = step.number, micro.number
                before = len(group.records())
                micro.backward(module(torch.ones(1, 200)).sum())
                counts[place] -= before
            run.optimizers[0].zero_grad()
        return counts


def test_the_reduction_overlaps_with_the_backward_pass_of_the_last_micro_batch(ranks):
    """From the second step on, when the order of gradients is known, and only in the last pass."""
    for rank, counts in enumerate(ranks.run(count_calls_before_the_last_gradient, 2)):
        first, last = 2 * rank, 2 * rank + 1
        assert [counts[step, first] for step in (1, 2, 3)] == [0, 0, 0]
        assert counts[1, last] == 0
        assert counts[2, last] >= 3
        assert counts[3, last] >= 3


def test_reentrant_checkpointing_in_some_micro_batches():
    """Once it was seen, gradients are folded after backward, since any may be accumulated again."""

    def body(group):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
        run = small_run(group, module, micro_batches=4)

        def loss(micro):
            x = torch.ones(2, 300, requires_grad=True)
            nested = 0
            if micro.number % 2 == 0:
                nested = checkpoint(module[1], x, use_reentrant=True)
            return (nested + module[1](module[0](x))).sum()

        for step in run.steps(4):
            for micro in step.micro_batches():
                micro.backward(loss(micro))
            gradient = module[1].weight.grad.clone()
            module.zero_grad()
        sum(loss(micro_of(number)) for number in range(4)).div(4).backward()
        torch.testing.assert_close(gradient, module[1].weight.grad)
        return step.number

    assert on_threads(body, 1) == [4]


def micro_of(number):
    return type("Numbered", (), {"number": number})


def rebuild_in_the_memory_of_the_first_buckets(ctx):
    group = ctx.group("shm")
    net = nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.ones(2, 128)
    with torch_settings(), warnings.catch_warnings():
        warnings.simplefilter("error")  # it would warn that gradients are in ordinary memory
        run = ElasticRun(net, optimizer, group=group, micro_batches=8)
        for step in run.steps(3):
            for micro in step.micro_batches():
                micro.backward(net(rows).sum())
            optimizer.zero_grad()
            group._engine._slab._free.clear()  # there is no memory but that of the first buckets
        run.close()


def test_rebuild_needs_no_more_memory_than_the_first_buckets(ranks):
    """Otherwise the second step would be the peak of a training."""
    ranks.run(rebuild_in_the_memory_of_the_first_buckets, 2)
