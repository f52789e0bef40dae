"""The command `phalanx checkpoint`."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from checkpoint.states import saved
from checkpoint.torch_states import save_archives, sharded_folder
from phalanx.checkpoint import CheckpointManager, PerRank
from phalanx.launch.cli import main

from .conftest import clean_env
from .internals import (
    LocalCheckpointDirectory,
    Manifest,
    _checkpoint_commands,
    format_age,
    format_size,
)


def state(step, rank=0):
    return {
        "model": {"weight": torch.full((64, 32), float(step)), "bias": torch.zeros(7)},
        "lr": 0.1 / step,
        "betas": (0.9, 0.99),
        "shape": torch.Size([2, 3]),
        "seen": PerRank(torch.tensor([step, rank])),
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with steps 10 to 40 saved by two ranks; relative paths keep output predictable."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30, 40):
        saved(f"run/step-{step:08d}", [state(step, rank) for rank in (0, 1)])
    return tmp_path / "run"


def call(*args, code=0):
    done = CliRunner().invoke(main, ["checkpoint", *map(str, args)])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def data_file(checkpoint):
    return next(each for each in sorted(checkpoint.iterdir()) if each.suffix == ".safetensors")


def damage(file, where=-1):
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(data)


def test_ls_lists_checkpoints_with_sizes(run):
    lines = call("ls", "run").splitlines()
    assert lines[0].split() == ["step", "ranks", "tensors", "size", "age", "path"]
    assert lines[1].split()[:5] == ["10", "2", "4", "8.43", "KiB"]
    assert [line.split()[-1] for line in lines[1:5]] == [
        f"run/step-{step:08d}" for step in (10, 20, 30, 40)
    ]
    assert lines[-1] == "4 checkpoints, 33.7 KiB"
    (one,) = json.loads(call("ls", "--json", "run/step-00000010"))
    assert (one["step"], one["ranks"], one["tensors"], one["files"]) == (10, 2, 4, 2)
    files = (run / "step-00000010").glob("*.safetensors")
    assert one["bytes"] == sum(each.stat().st_size for each in files)


def test_ls_marks_damaged_checkpoints_and_continues(run):
    damage(run / "step-00000020" / "manifest.json")
    data_file(run / "step-00000030").unlink()
    output = call("ls", "run")
    assert output.count("damaged") == 2
    assert "checksum is wrong" in json.loads(call("ls", "--json", "run"))[1]["damaged"]


def test_ls_continues_past_symlinked_and_malformed_manifests(run):
    manifest = run / "step-00000020" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to("/etc/passwd")
    change_state(run / "step-00000030", lambda _: {"$per_rank": {"one": 1}})
    lines = call("ls", "run").splitlines()
    assert ["damaged" in line for line in lines[1:5]] == [False, True, True, False]
    assert "got {'one': 1}" in json.loads(call("ls", "--json", "run"))[2]["damaged"]


def change_state(checkpoint, change):
    """Replace the state in a manifest, with a valid checksum."""
    manifest = checkpoint / "manifest.json"
    document = Manifest.load(manifest.read_bytes(), "it")
    document.state = change(document.state)
    manifest.write_bytes(document.dump())


def test_diff_does_not_read_files_outside_the_checkpoint(run):
    def lead_out(state):
        pieces = [{"file": "../../secret", "at": [0, 8], "xxh3_128": "0" * 32}]
        return {**state, "more": {"$tensor": {"dtype": "int64", "shape": [1], "pieces": pieces}}}

    saved("other", [{"more": torch.zeros(1, dtype=torch.int64)}])
    change_state(run / "step-00000040", lead_out)
    assert "'../../secret'" in call("diff", "run", "other", code=1)


def test_checkpoints_removed_meanwhile_are_skipped(run, monkeypatch):
    steps = LocalCheckpointDirectory.steps
    listings = iter([[5], [5, *steps(LocalCheckpointDirectory("run"))]])
    monkeypatch.setattr(LocalCheckpointDirectory, "steps", lambda _: next(listings))
    assert call("ls", "run").splitlines()[-1] == "4 checkpoints, 33.7 KiB"
    monkeypatch.undo()
    monkeypatch.chdir(run.parent)
    hold = _checkpoint_commands.lock_for_reading

    def remove_first(path):
        shutil.rmtree(run / "step-00000010", ignore_errors=True)
        return hold(path)

    monkeypatch.setattr(_checkpoint_commands, "lock_for_reading", remove_first)
    lines = call("verify", "run").splitlines()
    assert lines[0] == "removed meanwhile: run/step-00000010"
    assert len(lines) == 4


def test_control_characters_in_saved_values_are_escaped(run):
    saved("odd", [{"\x1b[31m\nred": "\x9b31m", "plain": "\u00e9"}])
    lines = call("show", "odd").splitlines()
    assert lines[3].split() == ["\\x1b[31m\\nred", '"\\x9b31m"', "all"]
    assert lines[4].split() == ["plain", '"\u00e9"', "all"]


def test_a_closed_stdout_prints_no_error(run):
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "phalanx", "checkpoint", "show", "run"]
    done = subprocess.run(
        command, env=clean_env(), stdout=theirs, stderr=subprocess.PIPE, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


def test_show_lists_the_saved_values(run):
    lines = [line.split() for line in call("show", "run").splitlines()]
    assert lines[0][:6] == ["run/step-00000040:", "step", "40,", "8.43", "KiB,", "4"]
    assert ["model.weight", "float32", "64", "x", "32", "8.00", "KiB", "all"] in lines
    assert ["seen", "int64", "2", "16", "B", "1"] in lines
    assert ["lr", "0.0025", "all"] in lines
    assert ["betas[1]", "0.99", "all"] in lines
    shown = json.loads(call("show", "--json", "run/step-00000010"))
    assert {"name": "seen", "rank": 1, "dtype": "int64", "shape": [2], "bytes": 16} in shown[
        "state"
    ]


def test_verify_reports_damaged_files(run):
    assert call("verify", "run").count("good: run/step-") == 4
    file = data_file(run / "step-00000020")
    damage(file)
    lines = call("verify", "run", code=1).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith(f"damaged: run/step-00000020/{file.name}: ")
    assert "model.bias is damaged (bytes 208 to 236)" in lines[1]
    damage(file, 20)
    problems = json.loads(call("verify", "--json", "run/step-00000020", code=1))
    assert any("header" in each for each in problems["run/step-00000020"])
    os.truncate(file, 100)
    assert "bytes, expected" in call("verify", "run/step-00000020", code=1)
    damage(run / "step-00000020" / "manifest.json")
    assert "manifest.json" in call("verify", "run/step-00000020", code=1)


def test_verify_checks_every_byte(run):
    checkpoint = run / "step-00000010"
    for file in sorted(checkpoint.iterdir()):
        whole = file.read_bytes()
        for where in range(0, len(whole), 97):
            damage(file, where)
            assert "damaged" in call("verify", checkpoint, code=1), (file, where)
            file.write_bytes(whole)
    call("verify", checkpoint)


def test_diff_lists_changed_added_and_removed_values(run):
    lines = [line.split() for line in call("diff", "run", code=1).splitlines()]
    assert lines[0][-5:] == ["4", "differ,", "4", "are", "equal"]
    assert ["changed", "model.weight", "all", "values", "of", "float32[64,", "32]"] in lines
    assert ["changed", "lr", "all", "0.0033333333333333335", "->", "0.0025"] in lines
    assert "0 differ" in call("diff", "run/step-00000010", "run/step-00000010")
    other = {**state(10), "model": {"weight": torch.zeros(3, dtype=torch.int32)}, "new": 1}
    saved("other", [other, other])
    found = json.loads(call("diff", "--json", "run/step-00000010", "other", code=1))
    assert {(each["name"], each["change"], each["difference"]) for each in found} >= {
        ("model.weight", "changed", "float32[64, 32] -> int32[3]"),
        ("model.bias", "removed", "float32[7]"),
        ("new", "added", "1"),
    }


def test_diff_distinguishes_dotted_keys_from_nested_keys(run):
    for name, value in (("one", 1), ("two", 7)):
        saved(name, [{"a.b": value, "a": {"b": 2}}])
    assert "1 differ, 1 are equal" in call("diff", "one", "two", code=1)


def test_diff_compares_values_saved_at_different_world_sizes(run):
    big = {"weight": torch.arange(3_000_000)}
    saved("two", [big, big])
    saved("three", [big, big, big])
    assert "0 differ, 1 are equal" in call("diff", "two", "three")
    big["weight"][5] = 0
    saved("three", [big, big, big])
    assert "1 differ" in call("diff", "two", "three", code=1)


def test_prune_removes_checkpoints_and_reports_what_it_keeps(run):
    args = ["run", "--keep-last", 1, "--keep-every", 20]
    lines = call("prune", "--dry-run", *args).splitlines()
    assert [line.split()[3:] for line in lines[1:5]] == [
        ["would", "be", "removed"],
        ["kept:", "multiple", "of", "20"],
        ["would", "be", "removed"],
        ["kept:", "the", "last", "one"],
    ]
    assert lines[-1] == "2 checkpoints would be removed, 16.9 KiB"
    assert CheckpointManager("run").steps() == [10, 20, 30, 40]
    assert call("prune", *args).splitlines()[-1] == "2 checkpoints removed, 16.9 KiB"
    assert CheckpointManager("run").steps() == [20, 40]
    assert json.loads(call("prune", "--json", *args)) == [
        {"step": 20, "kept": "multiple of 20"},
        {"step": 40, "kept": "the last one"},
    ]


def test_prune_keeps_no_multiples_by_default(run):
    with CheckpointManager("run") as folder:
        folder.save(1000, {})
        folder.save(1001, {})
    call("prune", "run", "--keep-last", 1)
    assert CheckpointManager("run").steps() == [1001]


def test_prune_keeps_the_last_undamaged_checkpoint(run):
    damage(data_file(run / "step-00000040"))
    call("prune", "run", "--keep-last", 1)
    assert CheckpointManager("run").steps() == [30, 40]
    assert call("verify", "run", code=1).startswith("good: run/step-00000030")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ls", "nowhere"], ["nowhere does not exist"]),
        (["ls", "."], ["contains no checkpoint"]),
        (["show", "file.txt"], ["contains no checkpoint"]),
        (["verify", "empty"], ["contains no checkpoint"]),
        (["ls", "loop"], ["Too many levels of symbolic links: 'loop'"]),
        (["prune", "loop"], ["Too many levels of symbolic links: 'loop'"]),
        (["ls", ""], ["path must not be empty"]),
        (["prune", "empty"], ["contains no checkpoint"]),
        (["prune", "nowhere"], ["nowhere does not exist"]),
        (["prune", "run/step-00000010"], ["is a checkpoint; prune needs"]),
        (["prune", "run", "--keep-last", "0"], ["keep_last must be at least 1"]),
        (["prune", "run", "--keep-every", "0"], ["keep_every must be at least 1"]),
        (["diff", "run/step-00000010"], ["give a second path"]),
        (["show"], ["PATH"]),
    ],
)
def test_usage_errors_print_no_traceback(run, args, words):
    (run.parent / "empty").mkdir()
    (run.parent / "file.txt").touch()
    (run.parent / "loop").symlink_to("loop")
    done = CliRunner().invoke(main, ["checkpoint", *args])
    assert done.exit_code in {1, 2}
    assert isinstance(done.exception, SystemExit)
    for word in words:
        assert word in done.output


def test_checkpoint_commands_do_not_import_torch(run):
    commands = [[name, "run"] for name in ("ls", "show", "verify", "diff", "prune")]
    code = (
        "import sys; from phalanx.launch.cli import main\n"
        f"for command in {commands}:\n"
        "    main(['checkpoint', *command], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=clean_env(), capture_output=True, check=True)


def test_sizes_and_ages_are_formatted_for_people():
    sizes = {0: "0 B", 999: "999 B", 1000: "0.98 KiB", 1536: "1.50 KiB", 10**9: "954 MiB"}
    assert {each: format_size(each) for each in sizes} == sizes
    assert format_size(5 << 40) == "5.00 TiB"
    ages = {-5: "0 s", 60: "60 s", 300: "5 min", 9000: "2 h", 10**6: "12 d"}
    assert {each: format_age(each) for each in ages} == ages


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Folders of torch: a sharded one of DCP, and archives of two ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch").mkdir()
    sharded_folder(tmp_path / "torch" / "dcp-9")
    states = [{"w": torch.ones(3, 4), "rank": rank} for rank in range(2)]
    save_archives(tmp_path / "torch" / "archives-10", states)
    return tmp_path / "torch"


def test_ls_and_show_list_checkpoints_of_torch(theirs):
    lines = call("ls", "torch").splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["-", "3", "2"], ["-", "2", "2"]]
    assert [line.split()[-1] for line in lines[1:3]] == ["torch/dcp-9", "torch/archives-10"]
    assert lines[-1].startswith("2 checkpoints, ")
    (one,) = json.loads(call("ls", "--json", "torch/dcp-9"))
    assert one["format"] == "torch.distributed.checkpoint"
    assert one["bytes"] == sum(each.stat().st_size for each in (theirs / "dcp-9").iterdir())
    shown = call("show", "torch/dcp-9")
    assert "2 tensors in 4 files, saved by 3 ranks with torch.distributed.checkpoint" in shown
    assert ["grid", "float32", "5", "x", "7", "140", "B", "all"] in map(
        str.split, shown.splitlines()
    )
    state = json.loads(call("show", "--json", "torch"))["state"]
    assert {(each["name"], each["rank"], each.get("value")) for each in state} == {
        *[("w", 0, None), ("w", 1, None), ("rank", 0, 0), ("rank", 1, 1)]
    }


def test_directories_of_torch_may_have_any_names(theirs):
    for name in ("latest", "step1", "step1b2"):
        (theirs / name).mkdir()
        save_archives(theirs / name, [{"a": 1}])
    paths = [line.split()[-1] for line in call("ls", "torch").splitlines()[1:6]]
    assert paths == [
        f"torch/{each}" for each in ("latest", "step1", "step1b2", "dcp-9", "archives-10")
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint_0.pt"])
def test_file_of_torch_next_to_our_checkpoints_does_not_hide_them(theirs, name):
    call("convert", "torch/dcp-9", "run/step-00000007")
    (theirs.parent / "run" / name).touch()
    (one,) = json.loads(call("ls", "--json", "run"))
    assert (one["step"], one["format"]) == (7, "phalanx")


def test_verify_reads_checkpoints_of_torch(theirs):
    assert call("verify", "torch").count("good: ") == 2
    file = theirs / "archives-10" / "checkpoint_1.pt"
    damage(file, file.read_bytes().index(torch.ones(3, 4).numpy().tobytes()))
    output = call("verify", "torch", code=1)
    assert "good: torch/dcp-9" in output
    assert "damaged: torch/archives-10/checkpoint_1.pt" in output
    (theirs / "dcp-9" / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert "names os.system, which is not part of DCP" in call("verify", "torch", code=1)
    assert call("ls", "torch").count("damaged") == 1


def test_convert_writes_what_diff_finds_equal(theirs):
    for name, ranks in (("dcp-9", 1), ("archives-10", 2)):
        output = call("convert", f"torch/{name}", f"ours/{name}")
        assert output.startswith(f"torch/{name} (torch")
        assert f", {ranks} rank" in output
        assert "0 differ" in call("diff", f"torch/{name}", f"ours/{name}")
        assert "0 differ" in call("diff", f"ours/{name}", f"torch/{name}")
        assert call("verify", f"ours/{name}").startswith("good: ")
    made = json.loads(call("convert", "--json", "ours/archives-10", "run/step-00000007"))
    assert (made["ranks"], made["tensors"], made["step"]) == (2, 1, 7)
    assert made["source_format"] == "phalanx"
    assert CheckpointManager("run").steps() == [7]
    assert torch.equal(CheckpointManager("run").load()["w"], torch.ones(3, 4))


def test_diff_names_what_differs_from_a_checkpoint_of_torch(theirs):
    saved("ours", [{"w": torch.zeros(3, 4), "rank": rank} for rank in range(2)])
    found = json.loads(call("diff", "--json", "torch/archives-10", "ours", code=1))
    assert [(each["name"], each["rank"], each["change"]) for each in found] == [
        ("w", 0, "changed"),
        ("w", 1, "changed"),
    ]
    assert (theirs / "archives-10").is_dir()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["convert", "torch/dcp-9", "torch"], "torch already exists"),
        (["convert", "nowhere", "new"], "there is no checkpoint at nowhere"),
        (["convert", "torch", "new"], "there is no checkpoint at torch"),
        (["prune", "torch"], "prune removes those of phalanx"),
        (["prune", "torch/dcp-9"], "is a checkpoint; prune needs"),
        (["show", "hub"], "layout of Hugging Face"),
    ],
)
def test_misuse_with_checkpoints_of_torch_prints_no_traceback(theirs, args, words):
    (theirs.parent / "hub").mkdir()
    (theirs.parent / "hub" / "model.safetensors").touch()
    done = CliRunner().invoke(main, ["checkpoint", *args])
    assert done.exit_code in {1, 2}
    assert isinstance(done.exception, SystemExit)
    assert words in done.output
    assert not (theirs.parent / "new").exists()
