"""The code in the documentation runs, and its links and module names are valid."""

import io
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


@pytest.mark.slow
def test_the_documented_custom_backend_works(ranks):
    source = code("docs/groups.md", containing="register_backend(")
    function = re.search(r"def .*?\n\n", source, flags=re.DOTALL).group()
    assert len(function.strip().splitlines()) <= 5
    ranks.run(use_the_documented_backend, 2, args=(source,))


@pytest.mark.slow
def test_the_documented_spawn_returns_the_documented_results():
    source = code("docs/groups.md", containing="phalanx.spawn(")
    cell = {"__name__": "__main__"}
    exec(source, cell)  # noqa: S102 - our own document
    assert source.rstrip().endswith(f"# {cell['results']}")


WITH_PROGRAMS = {"checkpoint_async", "checkpoints", "elastic", "uneven"} | {
    f"ddp_{name}" for name in ("features", "hooks", "optimizers")
}


def the_readmes_training_loop():
    loop = code("README.md", containing="optimizer.step()")
    assert len(loop.splitlines()) <= 18
    return loop + "assert loss.item() < 0.01, loss\n"


def the_documented_torch_script():
    """Return the documented script for torch's DDP, with a check of the gradients added."""
    source = code("docs/groups.md", containing="dist.init_process_group(")
    body, last = source.rsplit("\n", 2)[:2]
    check = "means = [p.grad.clone() for p in model.parameters()]\n"
    check += "for mean, p in zip(means, model.parameters()):\n"
    check += "    dist.all_reduce(mean, dist.ReduceOp.AVG)\n"
    check += "    assert dist.get_backend() == 'shm' and torch.equal(mean, p.grad)\n"
    return f"{body}\n{check}{last}\n"


CHECKS = {
    "checkpoint_async": """
assert sorted(os.listdir("run")) == ["step-10", "step-20", "step-30"]
loaded = checkpointer.load("run/step-30")
assert loaded["model"]["weight"].equal(model.module.weight), "that was the last step"
""",
    "elastic": """
assert run.completed_steps == 60
assert run.restore("run/") == 60 and sorted(os.listdir("run"))[-1] == "step-00000060"
torch.use_deterministic_algorithms(False)
""",
}
"""Checks that run at the end of a page's program."""


def programs():
    """Yield the complete programs of the pages: the code blocks that create a group or a run."""
    for name in sorted(WITH_PROGRAMS):
        text = (ROOT / f"docs/{name}.md").read_text()
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        yield from ((name, block) for block in blocks if re.search(r"new_group\(\)|Run\(", block))


@pytest.mark.slow
def test_documented_programs_run(tmp_path):
    """All in one launch, since launching takes longer than any of them."""
    found = list(programs())
    assert {page for page, _ in found} == WITH_PROGRAMS
    assert {page.stem for page in ROOT.glob("docs/ddp_*.md")} <= WITH_PROGRAMS
    for page, source in found:
        assert len(source.splitlines()) <= 30, page
    found.insert(0, ("readme", the_readmes_training_loop()))
    if native.engine is not None:
        found.insert(0, ("groups", the_documented_torch_script()))
    parts = ["import os, runpy"]
    for number, (page, source) in enumerate(found):
        folder = tmp_path / f"{page}_{number}"
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(f"import os\n{source}{CHECKS.get(page, '')}")
        parts += [f"os.chdir({str(folder)!r})", f"runpy.run_path({str(program)!r})"]
    every = tmp_path / "every.py"
    every.write_text("\n".join(parts))
    out = io.BytesIO()
    launch.run(str(every), ranks=2, stdout=out)
    assert b"[rank 0] step 160: loss 0.0" in out.getvalue(), "a reader sees that it learns"


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=str)
def test_relative_links_exist(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        assert target.startswith("http") or (document.parent / path).exists(), target
        if anchor and not target.startswith("http"):
            headings = re.findall(r"^#+ (.+)$", (document.parent / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_modules_named_in_the_design_exist():
    text = (ROOT / "docs/design.md").read_text()
    named = set(re.findall(r"(?:`|^  )(_[a-z]\w+)(?=[`. ])", text, flags=re.MULTILINE))
    assert {"_call_arguments", "_status_store", "_failure_detector"} <= named
    assert named <= {path.stem for path in (ROOT / "src").rglob("_*.py")}
