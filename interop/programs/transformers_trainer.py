"""Trainer with a small GPT-2 that a configuration describes: nothing is downloaded."""

from typing import Any

import torch
from record import StepTimer, report
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

WORDS, LENGTH, STEPS = 256, 32, 16


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on every rank."""

    def __init__(self) -> None:
        self.tokens = torch.randint(
            WORDS, (256, LENGTH), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watch(TrainerCallback):
    """Keeps the times of steps."""

    def __init__(self) -> None:
        self.times = StepTimer()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.times.restart()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        self.times.step_ended()


def train(case: str, **options: Any) -> None:
    """Train, evaluate and report."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    watch = Watch()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir="trainer",
            per_device_train_batch_size=4,
            max_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[watch],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    report(case, loss=loss, module=trainer.model, times=watch.times, wrapper=trainer.model_wrapped)


def main() -> None:
    """Train twice; both leave ``ddp_find_unused_parameters`` to Trainer."""
    train("Trainer, GPT-2")
    train("Trainer, gradient checkpointing", gradient_checkpointing=True)


if __name__ == "__main__":
    main()
