"""Programs for torch, Accelerate, Lightning and Transformers on torch and on phalanx, side by side.

``make interop`` makes an environment with these frameworks and runs ``python -m interop`` in it. A
program runs unmodified in each mode (`catalog`); `runner` compares results bit by bit and times
step by step, `speed` compares drop-in with an edited script, and `table` writes what was found into
docs/integrations.md.
"""
