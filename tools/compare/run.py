"""Compare the speed of two commits: interleaved runs, the ratio with a 95% interval.

    python tools/compare/run.py before-restructure HEAD --rounds 15

Each commit is built into a temporary directory. A round runs `workload.py` on two ranks with one
commit and then with the other, in alternating order. A figure is the median of the ratios of the
rounds; its interval is that of the order statistics, which assumes nothing about the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def build(commit: str, builds: Path) -> Path:
    """Install a commit below `builds` and return the directory to put on the path."""
    name = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, check=True, capture_output=True)
    target = builds / name.stdout.decode().strip()
    if (target / "site").exists():
        return target / "site"
    source = target / "source"
    source.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(source)], input=archive.stdout, check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(target / "site"), str(source)], check=True)
    return target / "site"


def measure(site: Path) -> dict[str, float]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, str(HERE / "workload.py")]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"the workload failed with {site}")
    return {name: float(value) for name, value in json.loads(outputs[0]).items()}


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the median, from the order statistics."""
    ordered, count = sorted(values), len(values)
    outside, low = 0.0, 0
    while low < count // 2 and outside + comb(count, low) / 2**count <= 0.025:
        outside += comb(count, low) / 2**count
        low += 1
    low = max(low - 1, 0)
    return ordered[low], ordered[count - 1 - low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--builds", type=Path, help="keep the builds here and use them again")
    arguments = parser.parse_args()
    samples: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        builds = arguments.builds or Path(folder)
        old = build(arguments.old, builds)
        new = build(arguments.new, builds)
        for number in range(arguments.rounds):
            sites = (old, new) if number % 2 == 0 else (new, old)
            timed = {site: measure(site) for site in sites}
            samples.append((timed[old], timed[new]))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    print(f"| case | {arguments.old} | {arguments.new} | new / old | 95% interval |")
    print("|---|---|---|---|---|")
    for name in samples[0][0]:
        before, after = (median(sample[side][name] for sample in samples) for side in (0, 1))
        ratios = [sample[1][name] / sample[0][name] for sample in samples]
        low, high = interval(ratios)
        print(
            f"| {name} | {before * 1e6:,.2f} us | {after * 1e6:,.2f} us "
            f"| {median(ratios):.3f} | {low:.3f} to {high:.3f} |"
        )


if __name__ == "__main__":
    main()
