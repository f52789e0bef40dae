"""Lightning's demo modules in its Trainer: automatic and manual, accumulation, checkpoints."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from record import StepTimer, report


class Watch(Callback):
    """Keeps the times of steps, the last loss, and the wrapper that the strategy made.

    A step is one of the optimizer: all the batches whose gradients it accumulates.
    """

    def __init__(self) -> None:
        self.times = StepTimer()
        self.loss = torch.tensor(0.0)
        self.wrapper: torch.nn.Module | None = None

    def on_train_batch_start(
        self, trainer: Trainer, _module: LightningModule, _batch: Any, number: int
    ) -> None:
        """Start the clock with the first batch of a step."""
        if number % trainer.accumulate_grad_batches == 0:
            self.times.restart()

    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, outputs: Any, _batch: Any, number: int
    ) -> None:
        """Stop it with the last."""
        if (number + 1) % trainer.accumulate_grad_batches == 0:
            self.times.step_ended()
        self.loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.wrapper = trainer.strategy.model


def trainer(watch: Watch, *more: Callback, **options: Any) -> Trainer:
    """Return a trainer for two ranks that prints nothing."""
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[watch, *more],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(more),
        **options,
    )


def fit(case: str, module: LightningModule, **options: Any) -> None:
    """Fit a module for two epochs."""
    watch = Watch()
    trainer(watch, max_epochs=2, **options).fit(module)
    finish(case, module, watch)


def finish(case: str, module: LightningModule, watch: Watch) -> None:
    """Report the case."""
    report(case, loss=watch.loss, module=module, times=watch.times, wrapper=watch.wrapper)


def resume(case: str) -> None:
    """Fit for an epoch, and continue for another from its checkpoint, with a new module."""
    folder = Path("lightning")
    first = trainer(Watch(), ModelCheckpoint(folder, save_last=True), max_epochs=1)
    first.fit(BoringModel())
    watch, module = Watch(), BoringModel()
    second = trainer(watch, ModelCheckpoint(folder), max_epochs=2)
    second.fit(module, ckpt_path=str(folder / "last.ckpt"))
    assert second.global_step == 2 * first.global_step
    finish(case, module, watch)


def main() -> None:
    """Run all cases in one launch: importing Lightning takes longer than any of them."""
    seed_everything(0, verbose=False)
    fit("BoringModel", BoringModel())
    fit("ManualOptimBoringModel", ManualOptimBoringModel())
    fit("accumulation", BoringModel(), accumulate_grad_batches=4)
    resume("checkpoint, resumed")


if __name__ == "__main__":
    main()
