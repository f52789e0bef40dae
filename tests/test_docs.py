"""What the documents show is run: a reader will copy it."""

import os
import re
from pathlib import Path

import pytest

from phalanx import launch, native

ROOT = Path(__file__).parents[1]


def code(document, *, containing):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return block


def use_the_documented_backend(ctx, source):
    import torch

    exec(source, {})  # noqa: S102 - our own document
    group = ctx.group("quiet")
    tensor = torch.ones(3)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0] * 3
    assert group.records()[-1].operation == "allreduce"


def test_the_documented_backend_of_ones_own_works(ranks):
    source = code("docs/groups.md", containing="register_backend(")
    function = re.search(r"def .*?\n\n", source, flags=re.DOTALL).group()
    assert len(function.strip().splitlines()) <= 5
    ranks.run(use_the_documented_backend, 2, args=(source,))


WITH_PROGRAMS = {"checkpoints", "uneven"} | {
    f"ddp_{name}"
    for name in ("buffers", "compile", "delay", "hooks", "mesh", "optimizers", "precision", "rpc")
}


def the_readmes_training_loop():
    loop = code("README.md", containing="optimizer.step()")
    assert len(loop.splitlines()) <= 18
    return loop + "assert loss.item() < 0.01, loss\n"


def the_documented_torch_script():
    """Make the script for torch's own class one that compares the gradients, too."""
    source = code("docs/groups.md", containing="dist.init_process_group(")
    body, last = source.rsplit("\n", 2)[:2]
    check = "means = [p.grad.clone() for p in model.parameters()]\n"
    check += "for mean, p in zip(means, model.parameters()):\n"
    check += "    dist.all_reduce(mean, dist.ReduceOp.AVG)\n"
    check += "    assert dist.get_backend() == 'shm' and torch.equal(mean, p.grad)\n"
    return f"{body}\n{check}{last}\n"


def programs():
    """Find the programs in the pages on extension points: what makes a group is a whole one."""
    for page in sorted(
        [*ROOT.glob("docs/ddp_*.md"), ROOT / "docs/uneven.md", ROOT / "docs/checkpoints.md"]
    ):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
        yield from ((page.stem, block) for block in blocks if "new_group()" in block)


def test_programs_run(tmp_path):
    """All in one launch, for that takes longer than any of them."""
    found = list(programs())
    assert {page for page, _ in found} == WITH_PROGRAMS
    for page, source in found:
        assert len(source.splitlines()) <= 30, page
    found.insert(0, ("readme", the_readmes_training_loop()))
    if native.engine is not None:
        found.insert(0, ("groups", the_documented_torch_script()))
    paths = [tmp_path / f"{page}_{number}.py" for number, (page, _) in enumerate(found)]
    for path, (_, source) in zip(paths, found, strict=True):
        path.write_text(source)
    every = tmp_path / "every.py"
    every.write_text(
        f"import os, runpy\nos.chdir({str(tmp_path)!r})\n"
        f"for path in {[str(p) for p in paths]}:\n    runpy.run_path(path)\n"
    )
    launch.run(str(every), ranks=2)


def test_the_program_that_saves_while_it_trains(tmp_path):
    source = code("docs/checkpoint_async.md", containing="make_async_checkpointer()")
    assert len(source.splitlines()) <= 30
    script = tmp_path / "train.py"
    check = "loaded = checkpointer.load('run/step-30')\n"
    check += (
        "assert loaded['model']['weight'].equal(model.module.weight), 'that was the last step'\n"
    )
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{source}{check}")
    launch.run(str(script), ranks=2)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-10", "step-20", "step-30"]


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=str)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_the_design_names_modules_that_exist():
    text = (ROOT / "docs/design.md").read_text()
    named = set(re.findall(r"(?:`|^  )(_[a-z]\w+)(?=[`. ])", text, flags=re.MULTILINE)) - {"_issue"}
    assert {"_collectives", "_board", "_health"} <= named
    assert named <= {path.stem for path in (ROOT / "src").rglob("_*.py")}
