"""``detaudit run`` as users meet it: one clear line, the right exit code, and nothing recorded is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from detaudit.trace import open_trace

STABLE = """
import torch
from torch import nn
def build_model(): return nn.Linear(8, 4)
def make_inputs(): return torch.ones(2, 8)
"""

COUNTING = """
import os, signal, time
import torch
from torch import nn
RUN = [0]
class Model(nn.Module):
    def forward(self, x):
        RUN[0] += 1
        if RUN[0] == {run}:
            {action}
        return x + 1
def build_model(): return Model()
def make_inputs(): return torch.ones(3)
"""


def detaudit(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "detaudit", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120, **options
    )


def target(folder: Path, source: str, name: str = "model.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return name


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("detaudit: ")
    return lines[0]


def runs_in(path: Path) -> int:
    with open_trace(path) as trace:
        return len(trace.runs())


def test_a_stable_model(tmp_path: Path) -> None:
    name = target(tmp_path, STABLE)
    done = detaudit("run", name, "--json", "report.json", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "clean" not in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["format"], report["version"], report["exit_code"]) == ("detaudit-report", 1, 0)
    assert report["rate"]["high"] == pytest.approx(1 - 0.05 ** (1 / 19))
    again = detaudit("report", "t.detaudit", "--format", "json", cwd=tmp_path)
    assert json.loads(again.stdout)["verdict"] == "deterministic"


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (None, ["absent.py"], "no such file"),
        (None, ["."], "folder"),
        ("def broken(:\n", ["model.py"], "line 1"),
        ("def build_model(): return 1\n", ["model.py"], "make_inputs"),
        ("def make_inputs(): return 1\n", ["model.py"], "build_model"),
        (STABLE, ["model.py:other"], "other"),
        (STABLE, ["model.py:build_model", "--script"], "script"),
        ("def build_model(): return 3\ndef make_inputs(): return 1\n", ["model.py"], "cannot be called"),
        (STABLE + "\ndef make_inputs(): return [1]\n", ["model.py"], "returned list"),
        (STABLE, ["model.py", "--output", "no/such/folder/t.detaudit"], "folder"),
    ],
)
def test_what_cannot_be_audited(source: str | None, arguments: list[str], words: str, tmp_path: Path) -> None:
    if source is not None:
        target(tmp_path, source)
    done = detaudit("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in one_line(done)


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    target(tmp_path, STABLE)
    (tmp_path / "t.detaudit").write_text("mine")
    done = detaudit("run", "model.py", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode == 2
    assert (tmp_path / "t.detaudit").read_text() == "mine"


def test_a_target_that_raises_in_run_5_keeps_the_four_before(tmp_path: Path) -> None:
    target(tmp_path, COUNTING.format(run=5, action="raise ValueError('too hot')"))
    done = detaudit("run", "model.py", "--no-observer", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode == 2
    assert "run 5" in done.stderr
    assert "too hot" in done.stderr
    assert "model.py" in done.stderr
    assert "hooks/" not in done.stderr
    assert "detaudit/execution.py" not in done.stderr
    assert runs_in(tmp_path / "t.detaudit") == 4


def test_ctrl_c_in_run_7_keeps_the_six_before(tmp_path: Path) -> None:
    target(tmp_path, COUNTING.format(run=7, action="os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"))
    done = detaudit("run", "model.py", "--no-observer", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert runs_in(tmp_path / "t.detaudit") == 6


def test_kill_9_in_run_7_keeps_the_six_before(tmp_path: Path) -> None:
    target(tmp_path, COUNTING.format(run=7, action="os.kill(os.getpid(), signal.SIGKILL)"))
    done = detaudit("run", "model.py", "--no-observer", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert runs_in(tmp_path / "t.detaudit") == 6
    shown = detaudit("report", "t.detaudit", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "6 runs" in shown.stdout


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    target(tmp_path, STABLE)
    command = [sys.executable, "-m", "detaudit", "run", "model.py", "--runs", "3"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (141, b"")


def test_a_full_disk_is_one_line_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    target(
        tmp_path,
        """
        import torch
        from torch import nn
        RUN = [0]
        class Varying(nn.Module):
            def forward(self, x):
                RUN[0] += 1
                return x + RUN[0]
        def build_model(): return Varying()
        def make_inputs(): return torch.zeros(5_000, 64)
        """,
    )

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))

    done = detaudit("run", "model.py", "--output", "t.detaudit", cwd=tmp_path, preexec_fn=limited)
    assert done.returncode == 2, done.stderr
    assert "--output" in one_line(done)
    assert 1 <= runs_in(tmp_path / "t.detaudit") < 20


def test_a_script_with_arguments(tmp_path: Path) -> None:
    target(
        tmp_path,
        """
        import sys, torch
        from torch import nn
        assert __name__ == "__main__"
        steps = int(sys.argv[1])
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        x = torch.ones(2, 8)
        for _ in range(steps):
            x = model(x)
        print("done", steps)
        """,
    )
    arguments = ["run", "model.py", "--runs", "2", "--output", "t.detaudit", "--json", "r.json", "--", "3"]
    done = detaudit(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done 3" not in done.stdout
    assert "done 3" in (tmp_path / "t.detaudit.d" / "output.txt").read_text()
    with open_trace(tmp_path / "t.detaudit") as trace:
        recorded = [run for run in trace.runs() if run.condition == "fresh-process"]
        paths = [trace.modules[index].path for index in recorded[0].module]
    assert paths == ["", "0", "1"] * 3


def test_a_script_that_fails(tmp_path: Path) -> None:
    target(tmp_path, "import torch, sys\nsys.exit('no data')\n")
    done = detaudit("run", "model.py", "--runs", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "no data" in done.stderr


def test_a_script_that_takes_its_process_down(tmp_path: Path) -> None:
    target(tmp_path, "import os, torch\nos._exit(9)\n")
    done = detaudit("run", "model.py", "--runs", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "exit status 9" in one_line(done)
    assert not list(tmp_path.glob("*.detaudit*"))


def test_what_a_failing_script_printed_is_shown(tmp_path: Path) -> None:
    source = "import argparse, torch\nargparse.ArgumentParser(prog='mine').parse_args()\n"
    target(tmp_path, source)
    done = detaudit("run", "model.py", "--runs", "2", "--", "--unknown", cwd=tmp_path)
    assert done.returncode == 2
    assert "unrecognized arguments: --unknown" in done.stderr


def test_a_target_that_fails_before_its_first_run_leaves_no_trace(tmp_path: Path) -> None:
    target(tmp_path, "def build_model(): raise OSError('no weights')\ndef make_inputs(): return 1\n")
    done = detaudit("run", "model.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "no weights" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["model.py"]


def test_only_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    target(tmp_path, STABLE)
    done = detaudit("run", "model.py", "--only", "typo*", cwd=tmp_path)
    assert done.returncode == 2
    assert "matches no module" in one_line(done)


def test_files_of_the_current_folder_stand_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "asyncio.py").write_text("raise SystemError('shadowed')")
    target(tmp_path / "targets", "import torch\ntorch.nn.Tanh()(torch.ones(2))\n", "script.py")
    # As the installed program: -P keeps the current folder off sys.path.
    command = [sys.executable, "-P", "-m", "detaudit", "run", "targets/script.py", "--runs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_the_next_command_works_where_this_one_was_typed(tmp_path: Path) -> None:
    (tmp_path / "some targets").mkdir()
    name = "some targets/" + target(tmp_path / "some targets", STABLE) + ":build_model"
    done = detaudit("run", name, "--runs", "2", "--no-observer", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == f"  detaudit run '{name}' --runs 300 --no-observer"


def test_the_report_as_json_on_standard_output(tmp_path: Path) -> None:
    name = target(tmp_path, STABLE)
    (tmp_path / "out").mkdir()
    arguments = ["run", name, "--runs", "2", "--output", "out/t.detaudit", "--json", "-"]
    done = detaudit(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["trace"]) == ("deterministic", "out/t.detaudit")
    assert "deterministic" in done.stderr
    assert not (tmp_path / "-").exists()


def test_what_c_code_and_other_processes_print_does_not_get_into_the_json(tmp_path: Path) -> None:
    action = "os.write(1, b'RAW'); os.system('echo RAW')"
    name = target(tmp_path, COUNTING.format(run=1, action=action))
    done = detaudit("run", name, "--runs", "2", "--output", "t.detaudit", "--json", "-", cwd=tmp_path)
    assert json.loads(done.stdout)["verdict"] == "deterministic"
    assert done.stderr.count("RAW") == 2


@pytest.mark.parametrize("name", ["t.detaudit", "model.py", "./model.py"])
def test_a_report_does_not_replace_the_trace_or_the_target(tmp_path: Path, name: str) -> None:
    target(tmp_path, STABLE)
    done = detaudit("run", "model.py", "--output", "t.detaudit", "--json", name, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "model.py").read_text()) == (2, STABLE)
    assert f"{Path(name)} would be written over" in one_line(done)


def test_a_target_may_change_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    name = target(tmp_path, COUNTING.format(run=1, action="os.chdir('elsewhere')"))
    arguments = ("--runs", "3", "--no-observer", "--output", "t.detaudit", "--json", "r.json")
    done = detaudit("run", name, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["runs"] == 3
    assert runs_in(tmp_path / "t.detaudit") == 3


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
@pytest.mark.parametrize("variables", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, variables: dict[str, str]) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    name = target(folder, STABLE)
    environment = {**os.environ, **variables}
    done = detaudit("run", name, "--runs", "2", "--output", "t.detaudit", cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_model_that_differs_by_a_sparse_tensor(tmp_path: Path) -> None:
    source = COUNTING.format(run=2, action="return torch.ones(3).to_sparse()")
    name = target(tmp_path, source.replace("return x + 1", "return x.to_sparse()"))
    done = detaudit("run", name, "--no-observer", "--output", "t.detaudit", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr


def test_modules_without_a_hash_are_refused_in_one_line(tmp_path: Path) -> None:
    model = (
        "import dataclasses\n@dataclasses.dataclass\nclass M(nn.Module):\n"
        "    def __post_init__(self): super().__init__()\n"
    )
    source = STABLE.replace("def build_model", f"{model}def build_model")
    name = target(tmp_path, source.replace("nn.Linear(8, 4)", "M()"))
    done = detaudit("run", name, cwd=tmp_path)
    assert done.returncode == 2
    assert "the model (M) has no hash" in one_line(done)


def test_a_report_that_cannot_be_written_is_told_before_the_runs(tmp_path: Path) -> None:
    name = target(tmp_path, STABLE)
    done = detaudit("run", name, "--output", "t.detaudit", "--json", "absent/r.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "folder does not exist" in one_line(done)
    assert not (tmp_path / "t.detaudit").exists()
