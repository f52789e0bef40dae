"""A decoder on a mesh of two axes: data (replicated or sharded) and tensor parallel."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import StepTimer, report
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, LAYERS, WORDS, STEPS = 256, 8, 2, 512, 16


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions, with as many heads as this rank has."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the input."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


PLAN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def main(data_axis: str) -> None:
    """Train with `data_axis` "replicate" or "shard", with a checkpoint in the middle."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    apply = fully_shard if data_axis == "shard" else replicate
    for part in (*model.blocks, model):
        apply(part, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    source = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    times = StepTimer()
    for step in range(STEPS):
        if step == STEPS // 2:
            save_and_load(model, optimizer)
        tokens = torch.randint(WORDS, (4, 33), generator=source)
        times.restart()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        times.step_ended()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group("data"))
    report(f"2-D mesh, {data_axis}", loss=mean, module=model, times=times, replicated=False)
    dist.destroy_process_group()


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write all of it, forget it, and read it back."""
    saved, moments = get_state_dict(model, optimizer)
    dcp.save({"model": saved, "optimizer": moments}, checkpoint_id="step")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    empty, moments = get_state_dict(model, optimizer)
    loaded = {"model": empty, "optimizer": moments}
    dcp.load(loaded, checkpoint_id="step")
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


if __name__ == "__main__":
    main(sys.argv[1])
