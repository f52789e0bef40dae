"""A differential fuzzer for `phalanx.DDP`.

A `Program` (`program`) is a small model and a sequence of training steps, drawn from a seed
(`draw`). Three interpreters run it:

- `play.play` on every rank of a group, with `phalanx.DDP`,
- the same with torch's class, where torch supports the program,
- `oracle.Oracle` in one process, which computes what the mathematics says.

`check` compares what they did, and shrinks a program that fails. To run one again::

    cd tests && python -m ddp.fuzz --seed 17
    cd tests && python -m ddp.fuzz --program '{"seed": 17, ...}'
"""
