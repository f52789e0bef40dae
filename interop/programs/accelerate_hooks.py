"""Communication hooks, as Accelerate registers them: torch's own, on whichever DDP there is."""

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from record import StepTimer, report

WIDTH, STEPS = 256, 24
HOOKS = {
    "fp16 hook": DDPCommunicationHookType.FP16,
    "PowerSGD hook": DDPCommunicationHookType.POWER_SGD,
}


def train(case: str, hook: DDPCommunicationHookType) -> None:
    """Train with a hook."""
    AcceleratorState._reset_state(reset_partial_state=False)
    options = {"start_powerSGD_iter": 4} if hook is DDPCommunicationHookType.POWER_SGD else {}
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
    accelerator = Accelerator(kwargs_handlers=[handler])
    set_seed(0)
    linear = torch.nn.Linear
    plain = torch.nn.Sequential(linear(WIDTH, WIDTH), torch.nn.Tanh(), linear(WIDTH, WIDTH))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    source = torch.Generator().manual_seed(accelerator.process_index)
    times = StepTimer()
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=source)
        times.restart()
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.step_ended()
    mean = accelerator.reduce(loss.detach(), "mean")
    report(f"Accelerate, {case}", loss=mean, module=plain, times=times, wrapper=model)


def main() -> None:
    """Train with each hook."""
    for case, hook in HOOKS.items():
        train(case, hook)
    Accelerator().end_training()


if __name__ == "__main__":
    main()
