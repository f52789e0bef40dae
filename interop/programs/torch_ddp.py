"""torch's DDP as in its tutorial: eight layers, a distributed sampler, `no_sync`."""

import torch
import torch.distributed as dist
from record import StepTimer, report
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS, STEPS = 1024, 8, 24


def main() -> None:
    """Train for one epoch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    ]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(32 * STEPS * dist.get_world_size(), WIDTH)
    data = TensorDataset(inputs, inputs.roll(1, 0))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

    times = StepTimer()
    for x, y in loader:
        times.restart()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        times.step_ended()
    with model.no_sync():
        model(x).sum().backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    report("torch DDP", loss=total, module=model.module, times=times, wrapper=model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
