"""A training whose result is compared to the bit, however often its workers die.

    python tests/elastic/chaos_training.py --model conv --steps 60 --result result.json
    phalanx run --elastic -n 3 tests/elastic/chaos_training.py --model conv --steps 60 ...

Every worker that reaches the end writes ``RESULT.<worker>``, and the leader ``RESULT``: a leader
may die at the end, when all others have asked who it is. What is under "result" is the same in all
of them, at every world size and after every failure; "executed" is how many micro-batches this
process has run, some of them in place of others.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

# The directory of the script comes first in sys.path, as with any script.
from training import BATCH_SIZE, CLASSES, Samples, Transformer

from phalanx.elastic import ElasticRun
from phalanx.env import launched_rank, read_elastic_env
from phalanx.testing import faults

EVALUATION_INTERVAL = 10  # steps


class MLP(nn.Sequential):
    """Two layers, on images."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class ConvNet(nn.Sequential):
    """Convolutions with batch norm and dropout, on images."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3)),
            *(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
        )
        # Its elements share memory, so that no state can be loaded into it.
        self.register_buffer("expanded", torch.ones(1).expand(3))


MODELS = {"mlp": MLP, "conv": ConvNet, "transformer": Transformer}


class TrainingLog:
    """What happened in each step, whoever ran it; a replacement gets it with the state."""

    def __init__(self):
        self.losses = []
        self.evaluations = []
        self.samples = hashlib.sha256().hexdigest()

    def add(self, loss, samples):
        self.losses.append(loss.hex())
        text = f"{self.samples} {len(self.losses)} {samples}"
        self.samples = hashlib.sha256(text.encode()).hexdigest()

    def state_dict(self):
        # Copies: the state that is being sent must not change.
        return {name: list(v) if isinstance(v, list) else v for name, v in vars(self).items()}

    def load_state_dict(self, state):
        self.__init__()
        vars(self).update(state)


STEPS_PER_FAULT = 30
"""If fewer than so many steps are left for a fault, they take longer: the machine may be busy."""


class Pacer:
    """Makes steps slow until the faults of the run have fired, so that it does not end before.

    Without faults, or if nobody knows whether they have fired, every step is slow.
    """

    def __init__(self, seconds):
        self._seconds = seconds
        entries = json.loads(os.environ.get("PHALANX_FAULTS", "[]"))
        self._awaited = set(range(len(entries)))
        self._log = Path(os.environ.get("PHALANX_FAULT_LOG", ""))
        self._has_faults = bool(entries) and "PHALANX_FAULT_LOG" in os.environ

    def pause(self, remaining):
        """Wait after a step, of which some remain."""
        if self._seconds and (self._awaited or not self._has_faults):
            needed = STEPS_PER_FAULT * len(self._awaited) if self._has_faults else 0
            time.sleep(self._seconds * max(1.0, needed / max(1, remaining)))
        if self._awaited and self._log.is_file():
            events = [json.loads(line) for line in self._log.read_text().splitlines()]
            self._awaited -= {each.get("fired") for each in events}


def main(options):
    torch.manual_seed(3)  # the initial weights
    model = MODELS[options.model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    log = TrainingLog()
    run = ElasticRun(
        model,
        optimizer,
        micro_batches=options.micro_batches,
        seed=5,
        backend=options.backend,
        state={"scheduler": scheduler, "log": log},
    )
    dataset = Samples("lstm" if options.model == "transformer" else "conv net")
    loader = run.loader(dataset, BATCH_SIZE, num_workers=options.workers)
    held_out = run.loader(dataset, 32)
    if options.directory is not None:
        run.restore(options.directory, keep_last=2)
    pacer = Pacer(options.pace)
    executed = 0

    def mean_loss(batch):
        _, inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    for step in run.steps(options.steps):
        loop = loader.next_loop
        samples = [loader.indices(loop, micro) for micro in range(options.micro_batches)]
        for micro in step.micro_batches(loader):
            ids, inputs, labels = micro.batch
            assert ids.tolist() == samples[micro.number], (step, micro)
            faults.reach("user:forward")
            micro.backward(cross_entropy(model(inputs), labels))
            executed += 1
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        faults.reach("user:optimizer")
        optimizer.step()
        faults.reach("user:zero_grad")
        optimizer.zero_grad()
        scheduler.step()
        log.add(step.loss, samples)
        if step.number % EVALUATION_INTERVAL == 0:
            log.evaluations.append(run.evaluate(mean_loss, held_out).hex())
        if options.directory is not None and run.save_every(options.save_every):
            run.save()  # again: replacing a checkpoint has instants of its own
        pacer.pause(options.steps - step.number)

    faults.reach("user:leader_finished" if run.is_leader else "user:finished")
    found = {
        "steps": run.completed_steps,
        "hash": run.hash(),
        "tensors": hash_tensors(model, optimizer),
        "losses": log.losses,
        "evaluations": log.evaluations,
        "samples": log.samples,
    }
    if options.result is not None:
        content = json.dumps({"result": found, "executed": executed})
        write_atomically(f"{options.result}.{worker_name()}", content)
        if run.is_leader:
            write_atomically(options.result, content)
    run.close()
    if read_elastic_env() is None:  # otherwise the run has its groups for itself
        run.group.shutdown()


def hash_tensors(model, optimizer):
    """Return a hash of the bytes of parameters, buffers and optimizer state."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for index, parameter in enumerate(model.parameters()):
        state = sorted(optimizer.state[parameter].items())
        tensors += [(f"{index} {name}", torch.as_tensor(value)) for name, value in state]
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def worker_name():
    elastic, launched = read_elastic_env(), launched_rank()
    if elastic is not None:
        return elastic.worker
    return "0" if launched is None else str(launched.rank)


def write_atomically(path, content):
    part = f"{path}.{os.getpid()}.part"
    Path(part).write_text(content)
    os.replace(part, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--workers", type=int, default=0, help="Processes that load data.")
    parser.add_argument("--directory", help="Save checkpoints here, and continue from them.")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--result", metavar="FILE")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="Per step.")
    options = parser.parse_args()
    print("was a standby:", b"_standby.py" in Path("/proc/self/cmdline").read_bytes(), flush=True)
    main(options)
