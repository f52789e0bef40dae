"""A joinable that counts the ranks with data and the shadowed steps."""

import torch

from phalanx.join import Join, Joinable, JoinHook


class Hook(JoinHook):
    def __init__(self, counter, log):
        self.counter, self.log = counter, log

    def main_hook(self):
        self.counter.shadowed += 1
        self.log.append((self.counter.name, "main"))
        self.counter.add_up(0.0)

    def post_hook(self, is_last_joiner):
        self.log.append((self.counter.name, "post"))
        self.counter.was_last = is_last_joiner


class Counter(Joinable):
    """Sums 1 from every rank with data, once per step."""

    def __init__(self, group, name="counter"):
        super().__init__()
        self.group, self.name = group, name
        self.counts, self.shadowed, self.was_last = [], 0, None
        self.given = None

    def step(self):
        work = Join.notify_join_context(self)
        self.counts.append(self.add_up(1.0))
        return work

    def add_up(self, mine):
        tensor = torch.tensor([mine, 0.0])
        self.group.allreduce([tensor]).wait()
        return int(tensor[0])

    def join_hook(self, **kwargs):
        self.given = kwargs
        return Hook(self, kwargs.get("log", []))

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def take(counters, steps):
    for _ in range(steps):
        for counter in counters:
            counter.step()
