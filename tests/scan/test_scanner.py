"""Whole scans: caching, parallel work, files that cannot be read, tools that fail, what a folder holds."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from detaudit.core.errors import TargetNotFound, Unsupported, UsageError
from detaudit.core.scans import ScanReport
from detaudit.scan import scanner
from detaudit.scan import tools as tools_module
from detaudit.scan.functions import functions
from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.sources import files_of, package_folders
from detaudit.scan.tools import Tools, find_tools
from tests.scan.support import ARCHS, BARE, FIXTURES, KERNELS, PTX_ONLY, fixture_scan, plain, tools


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_order_is_suspects_first_and_the_same_for_any_number_of_jobs() -> None:
    one = scan(plan([KERNELS, BARE]), tools(), Settings(jobs=1))
    many = scan(plan([KERNELS, BARE]), tools(), Settings(jobs=4))
    assert one == many
    suspects = [kernel.suspect for kernel in one.kernels]
    assert suspects == sorted(suspects, reverse=True)
    assert suspects[0]


def test_a_bare_cubin_tells_its_own_architecture() -> None:
    (kernel,) = scan(plan([BARE]), tools(), Settings()).kernels
    assert (kernel.arch, kernel.short, kernel.suspect) == ("sm_90", "fixture::scatter_add<4, float>", True)


@pytest.mark.parametrize(("wanted", "found"), [("80", {"sm_80"}), ("90", {"sm_90"}), ("120", {"sm_120"})])
def test_only_the_architecture_asked_for(wanted: str, found: set[str]) -> None:
    report = scan(plan([KERNELS]), tools(), Settings(archs=(wanted,)))
    assert {plain(kernel.arch) for kernel in report.kernels} == found


def test_an_architecture_that_is_not_there_is_told() -> None:
    report = scan(plan([KERNELS, BARE]), tools(), Settings(archs=("75",)))
    assert [file.problem for file in report.files] == ["no machine code for SM 75"] * 2
    assert report.kernels == ()


def test_an_image_of_ptx_only_is_told() -> None:
    (file,) = scan(plan([PTX_ONLY]), tools(), Settings()).files
    assert (file.functions, file.problem) == (
        0,
        "no machine code: PTX is compiled on the machine that runs it",
    )


def test_json_and_back() -> None:
    report = fixture_scan()
    assert ScanReport.from_json(report.to_json()) == report


def test_a_second_scan_disassembles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scan(plan([KERNELS]), tools(), Settings(cache=tmp_path))

    def never(*_: object) -> None:
        raise AssertionError("disassembled again")

    monkeypatch.setattr(scanner, "extract", never)
    copy = tmp_path / "elsewhere.fatbin"
    shutil.copy(KERNELS, copy)
    again = scan(plan([copy]), tools(), Settings(cache=tmp_path))
    assert {(k.name, k.arch, k.atomics) for k in again.kernels} == {
        (k.name, k.arch, k.atomics) for k in first.kernels
    }


def test_other_content_or_another_architecture_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    scan(plan([KERNELS]), tools(), Settings(cache=tmp_path))
    assert len(scan(plan([BARE]), tools(), Settings(cache=tmp_path)).kernels) == 1
    only = scan(plan([KERNELS]), tools(), Settings(archs=("80",), cache=tmp_path))
    assert {kernel.arch for kernel in only.kernels} == {"sm_80"}


def test_a_damaged_cache_is_written_again(tmp_path: Path) -> None:
    scan(plan([BARE]), tools(), Settings(cache=tmp_path))
    (stored,) = tmp_path.rglob("*.json")
    for damage in ("", "[]", '{"functions": [[1]]}', '{"functions": [["k", "sm_90", true, [{}]]]}'):
        stored.write_text(damage)
        assert len(scan(plan([BARE]), tools(), Settings(cache=tmp_path)).kernels) == 1
        assert len(stored.read_text()) > len(damage)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert len(scan(plan([BARE]), tools(), Settings(cache=blocked)).kernels) == 1


def test_a_damaged_image_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    data = bytearray(KERNELS.read_bytes())
    data[200:3000] = bytes(2800)
    broken = tmp_path / "broken.fatbin"
    broken.write_bytes(data)
    report = scan(plan([broken, BARE]), tools(), Settings())
    problems = {file.path: file.problem for file in report.files}
    assert problems[str(BARE)] is None
    assert problems[str(broken)]
    assert "fixture::scatter_add<4, float>" in {kernel.short for kernel in report.kernels}


def test_a_disassembler_that_does_not_know_an_architecture_is_followed_by_the_next(tmp_path: Path) -> None:
    good = tools()
    old = program(tmp_path / "nvdisasm", "echo 'nvdisasm fatal : unknown architecture' >&2; exit 1")
    report = scan(plan([BARE]), Tools(good.cuobjdump, (old, *good.nvdisasm)), Settings())
    assert len(report.kernels) == 1
    report = scan(plan([BARE]), Tools(good.cuobjdump, (old,)), Settings())
    assert report.files[0].problem == (
        "1 of 1 images not read: nvdisasm unknown: nvdisasm fatal : unknown architecture"
    )


def test_a_disassembler_that_dies_half_way_gives_no_half_result(tmp_path: Path) -> None:
    good = tools()
    dying = program(tmp_path / "nvdisasm", f'{good.nvdisasm[0]} "$@" | head -20; kill -9 $$')
    report = scan(plan([BARE]), Tools(good.cuobjdump, (dying,)), Settings())
    assert (report.kernels, bool(report.files[0].problem)) == ((), True)


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    path = tmp_path / "gone.so"
    (told,) = plan([path]).unread
    assert "cannot be read" in str(told.problem)


def test_progress_is_told_for_every_image() -> None:
    steps: list[int] = []
    work = plan([KERNELS, BARE, PTX_ONLY])
    scan(work, tools(), Settings(), lambda: steps.append(1))
    assert len(steps) == len(work.images) == 3


def test_an_interrupt_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(plan([KERNELS, BARE]), tools(), Settings(jobs=1), interrupt)


def test_folders_are_searched_and_each_file_is_read_once(tmp_path: Path) -> None:
    cache = tmp_path / "triton" / "cache" / "HASH"
    cache.mkdir(parents=True)
    shutil.copy(BARE, cache / "scatter_add.cubin")
    (cache / "scatter_add.json").write_text("{}")
    os.link(cache / "scatter_add.cubin", cache / "again.cubin")
    (cache / "link.cubin").symlink_to(cache / "scatter_add.cubin")
    (cache / "dangling.cubin").symlink_to(cache / "nowhere")
    assert files_of([tmp_path / "triton", cache / "again.cubin"]) == [cache / "again.cubin"]
    (kernel,) = scan(plan(files_of([tmp_path])), tools(), Settings()).kernels
    assert kernel.suspect


def test_a_file_named_by_the_user_is_looked_into_whatever_it_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "embedded.bin"
    path.write_bytes(b"header  " + BARE.read_bytes())
    assert files_of([tmp_path]) == []
    assert files_of([path]) == [path]
    assert len(scan(plan([path]), tools(), Settings()).kernels) == 1


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound, match="does not exist"):
        files_of([tmp_path / "missing"])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        files_of([fifo])


def test_a_package_by_import_name_and_by_distribution_name() -> None:
    assert package_folders("pytest") == package_folders("PyTest")[:1] or package_folders("PyTest")
    assert any((folder / "cli.py").is_file() for folder in package_folders("detaudit"))
    with pytest.raises(TargetNotFound, match="no package 'no_such_package'"):
        package_folders("no_such_package")


def test_without_the_tools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_module, "_folders", lambda: iter(()))
    with pytest.raises(Unsupported, match=r"cuobjdump and nvdisasm not found.*detaudit\[scan\]"):
        find_tools()


def test_cudas_own_tools_come_before_those_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    mine = program(tmp_path / "bin" / "nvdisasm", "echo 'Cuda compilation tools, release 9.9, V9.9.42'")
    program(tmp_path / "bin" / "cuobjdump", "exit 1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = find_tools()
    assert found.nvdisasm[0] == mine
    assert f"nvdisasm 9.9.42 ({mine})" in found.versions


@pytest.mark.slow
def test_the_committed_image_is_what_the_source_gives(tmp_path: Path) -> None:
    """Compiled again where there is a compiler: the same kernels, each with the same meaning."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(compiler).exists():
        pytest.skip("no nvcc here")
    built = tmp_path / "kernels.cubin"
    command = [
        compiler,
        "-std=c++17",
        "-cubin",
        "-arch=sm_80",
        str(FIXTURES / "kernels.cu"),
        "-o",
        str(built),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"this nvcc cannot compile here: {done.stderr[-200:]}")
    fresh = {k.name: k.meaning for k in scan(plan([built]), tools(), Settings()).kernels}
    assert fresh == {k.name: k.meaning for k in fixture_scan().kernels if k.arch == "sm_80"}


def test_all_four_architectures_are_in_the_committed_image() -> None:
    assert {plain(kernel.arch) for kernel in fixture_scan().kernels} == set(ARCHS)


FLAGS = '\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED {} EF_CUDA_VIRTUAL_SM(EF_CUDA_SM10)"\n'
"""As nvdisasm prints it for an image made before CUDA 13."""


@pytest.mark.parametrize(
    ("header", "arch"),
    [
        (FLAGS.format("EF_CUDA_ACCELERATORS EF_CUDA_SM90"), "sm_90a"),
        (FLAGS.format("EF_CUDA_64BIT_ADDRESS EF_CUDA_SM80"), "sm_80"),
        ("\t.target\tsm_120a\n", "sm_120a"),
        ("", "unknown"),
    ],
)
def test_the_architecture_that_an_image_names(header: str, arch: str) -> None:
    (function,) = functions([header.encode(), b'\t.section\t.text.kernel,"ax",@progbits\n'], "unknown")
    assert (function.name, function.arch, function.entry) == ("kernel", arch, False)
