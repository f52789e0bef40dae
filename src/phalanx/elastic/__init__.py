"""Elastic training: the same bits at any world size.

::

    run = ElasticRun(model, optimizer, micro_batches=8, seed=0)
    loader = run.loader(dataset, batch_size=16)
    run.restore("run/")
    for step in run.steps(1000):
        for micro in step.micro_batches(loader):
            micro.backward(loss_fn(model(micro.inputs), micro.targets))
        optimizer.step()
        optimizer.zero_grad()
        run.save_every(100)

``docs/elastic.md`` says what is promised, what it costs and what breaks it.
"""

from ._elastic_worker import MembershipChange
from ._loader import ElasticLoader
from ._micro_batches import MicroBatch, Step
from ._run import ElasticRun

__all__ = ["ElasticLoader", "ElasticRun", "MembershipChange", "MicroBatch", "Step"]
