"""A loop with Accelerate: accumulation, clipping, a schedule, gathered metrics, saved state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import StepTimer, report
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS = 512, 32


def main() -> None:
    """Train, load the state saved in the middle, and train the second half again."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    inputs = torch.randn(16 * STEPS * accelerator.num_processes, WIDTH)
    data = TensorDataset(inputs, inputs.flip(1))
    plain = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(2 * WIDTH, 2 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(2 * WIDTH, WIDTH),
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(
        plain, optimizer, DataLoader(data, batch_size=16, shuffle=True), schedule
    )
    times = StepTimer()
    for epoch in range(2):
        if epoch == 1:
            accelerator.load_state("half")
        for number, (x, y) in enumerate(loader):
            if number % 2 == 0:
                times.restart()
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                times.step_ended()
            if epoch == 0 and number == STEPS // 2 - 1:
                accelerator.save_state("half")
    mean = accelerator.gather_for_metrics(loss.detach()).mean()
    whole = accelerator.unwrap_model(model)
    report("Accelerate loop", loss=mean, module=whole, times=times, wrapper=model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
