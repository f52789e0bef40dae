"""Fabric: accumulation without synchronization, collectives, a saved and loaded state."""

import torch
from lightning.fabric import Fabric, seed_everything
from record import StepTimer, report

WIDTH, STEPS = 512, 40


def main() -> None:
    """Train with a save and a load in the middle."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(0, verbose=False)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(WIDTH, WIDTH), torch.nn.Tanh(), linear(WIDTH, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    source = torch.Generator().manual_seed(fabric.global_rank)
    times = StepTimer()
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=source)
        accumulating = step % 2 == 0
        if accumulating:
            times.restart()
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
            fabric.backward(loss)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.step_ended()
        if step == STEPS // 2 - 1:
            state = {"model": model, "optimizer": optimizer}
            fabric.save("fabric.ckpt", state)
            fabric.barrier()
            fabric.load("fabric.ckpt", state)
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    assert fabric.all_gather(loss.detach()).mean() == mean
    report("Fabric", loss=mean, module=model.module, times=times, wrapper=model._forward_module)


if __name__ == "__main__":
    main()
