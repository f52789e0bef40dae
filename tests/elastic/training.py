"""Small trainings of every kind of model, whose results are compared to the bit."""

import contextlib
import hashlib
import random
import threading

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from phalanx.elastic import ElasticRun

SAMPLES = 90  # with 8 micro-batches of 3 samples an epoch ends within a micro-batch
BATCH_SIZE = 3
CLASSES = 5
WORDS = 30
LENGTH = 7


class Transformer(nn.Module):
    """A transformer with dropout, on tokens."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.out(self.layers(self.embed(tokens)).mean(1))


class ConvNet(nn.Module):
    """Convolutions with batch norm, on images."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)
        )
        self.out = nn.Linear(8, CLASSES)

    def forward(self, images):
        return self.out(self.body(images).relu().mean((2, 3)))


class LSTM(nn.Module):
    """A recurrent net, on tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.rnn = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0][:, -1])


class StochasticDepthViT(nn.Module):
    """Patches, and blocks that are skipped at random: parameters without a gradient."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        make = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(
            make(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.out = nn.Linear(16, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.7:
                x = block(x)
        return self.out(x.mean(1))


class EmbeddingModel(nn.Module):
    """Embeddings of several features, most rows of which no micro-batch uses."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(200, 8) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, tokens):
        return self.out(torch.cat([t(tokens[:, i]) for i, t in enumerate(self.tables)], 1))


MODELS = {
    "transformer": Transformer,
    "conv net": ConvNet,
    "lstm": LSTM,
    "vit": StochasticDepthViT,
    "embeddings": EmbeddingModel,
}
DRAWS_NOTHING = {
    "transformer": lambda: Transformer(dropout=0.0),
    "conv net": ConvNet,
    "lstm": LSTM,
    "embeddings": EmbeddingModel,
}
IMAGES = ("conv net", "vit")
_drawing = threading.Lock()  # ranks that are threads share the generators


class Samples(torch.utils.data.Dataset):
    """Samples with their number, augmented by every generator that people use."""

    def __init__(self, model, *, augment=True):
        generator = torch.Generator().manual_seed(7)
        shape = (SAMPLES, 1, 8, 8) if model in IMAGES else (SAMPLES, LENGTH)
        self.images = torch.randn(shape, generator=generator)
        self.tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.has_images, self.augment = model in IMAGES, augment

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.has_images:
            value = self.images[index]
            if self.augment:
                noise = torch.randn(value.shape) * random.random() + float(np.random.rand())
                value = value + 0.1 * noise
        else:
            value = self.tokens[index]
            if self.augment:
                value = value.roll(random.randrange(LENGTH)).clone()
                value[np.random.randint(LENGTH)] = torch.randint(WORDS, ())
        return index, value, self.labels[index]


@contextlib.contextmanager
def torch_settings():
    """Undo what an elastic run sets for the process, which runs other tests too."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def make_run(group, model, *, micro_batches=8, draws=True, **options):
    """Make a model, its optimizer and an elastic run; all from fixed seeds."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = (MODELS if draws else DRAWS_NOTHING)[model]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    return ElasticRun(
        module,
        optimizer,
        micro_batches=micro_batches,
        seed=5,
        state={"scheduler": scheduler},
        group=group,
        **options,
    )


def train(group, model, steps, *, workers=0, directory=None, draws=True, **options):
    """Train up to a step; return the digest of the run, its losses and the samples it saw."""
    with torch_settings():
        run = make_run(group, model, draws=draws, **options)
        loader = run.loader(Samples(model, augment=draws), BATCH_SIZE, num_workers=workers)
        if directory is not None:
            run.restore(directory)
        losses, samples = {}, {}
        for step in run.steps(steps):
            for micro in step.micro_batches(loader):
                ids, inputs, labels = micro.batch
                samples[step.number, micro.number] = ids.tolist()
                micro.backward(cross_entropy(run.model(inputs), labels))
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizers[0].step()
            run.optimizers[0].zero_grad()
            run.state["scheduler"].step()
            losses[step.number] = step.loss.hex()
        loader.close()
        if directory is not None:
            run.save()
        return {"hash": run.hash(), "losses": losses, "samples": samples}


def train_on_rank(ctx, model, steps, backend, **options):
    """A body for the ranks of a pool or for threads."""
    return train(ctx.group(backend), model, steps, **options)


def combine(parts):
    """Return what all ranks found: one digest, one loss curve, all samples in order."""
    assert len({part["hash"] for part in parts}) == 1, "the ranks have different states"
    assert all(part["losses"] == parts[0]["losses"] for part in parts)
    samples = {place: ids for part in parts for place, ids in part["samples"].items()}
    assert len(samples) == sum(len(part["samples"]) for part in parts), "a micro-batch ran twice"
    ordered = [(place, samples[place]) for place in sorted(samples)]
    digest = hashlib.sha256(repr(ordered).encode()).hexdigest()
    return {
        "hash": parts[0]["hash"],
        "losses": parts[0]["losses"],
        "order": digest,
        "samples": [each for _, ids in ordered for each in ids],
    }
