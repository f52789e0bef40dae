"""Training scripts that `benchmarks.recovery` starts, kills parts of, and reads the logs of.

`workload` has the models and the data, which all scripts share, and `commit_log` what they log.
Neither needs phalanx: the script of torchft runs in an environment of its own (`make peers`), which
has what `requirements.txt` pins.
"""
