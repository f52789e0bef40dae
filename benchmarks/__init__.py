"""Side-by-side measurements: ours and its peers, in the same processes, in the same minutes.

::

    python -m benchmarks                          all entries
    python -m benchmarks group_overhead --quick   one of them, just to see that it works
    python -m benchmarks --json out.json          keep every sample
    python -m benchmarks --show out.json --markdown
    python -m benchmarks --json out.json --docs docs   what `make bench` does

An entry is a module in `benchmarks.entries`; its name is the entry's. It has one generator function
that sets its competitors up on one rank, yields them, and tidies up when it is resumed::

    @entry(
        title="Allreduce",
        peer="torch",
        compare=Compare.SPEED,
        ranks=(2,),
        grid={"size": [1 << 10, 1 << 20]},
        aims=[Aim("ours", at_least=10.0, where={"size": 1 << 10})],
    )
    def allreduce(ctx: RankContext, *, size: int) -> Iterator[Competitors]:
        ours, tensor = ctx.group("gloo"), torch.ones(size)
        ...
        yield {"ours": lambda: ours.allreduce(tensor).wait(), "torch": ...}

What happens then is told in `measure` (how the clock is kept) and `stats` (what is made of it).
Modules, from the bottom: `stats`, `entry`, `machine`, `wire` | `measure`, `results` |
`runner`, `table` | `page`, `style` | `points`, `rows` | `picture` | `__main__`. For entries to use:
`mpi` (whose ranks are `mpi_rank`), `elastic_jobs` (`elastic_rank`), `limits`, `busy`.

What is no call that can be repeated has a command of its own: `drift`, `memory` and `recovery`
(``python -m benchmarks.recovery``, with `recovery_jobs`, `recovery_times`, `recovery_picture`, and
the scripts in `peers`).
"""
