"""toolchain.py chooses, before it compiles, an nvcc, a C++ compiler for it, and the sources to compile."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import setup
import toolchain

NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  *--list-gpu-arch*) echo compute_70 compute_75 compute_80 compute_90 {more} ;;
  *--dryrun*) echo '#$ LIBRARIES="-L{toolkit}"' ;;
  *"-ccbin {refused}"*) echo "host_config.h: error: unsupported GNU version"; exit 1 ;;
esac
"""


@pytest.fixture
def toolkits(tmp_path, monkeypatch):
    """Return a function that installs a fake nvcc, which may refuse some C++ compilers, on an otherwise empty PATH."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "TOOLKITS", tmp_path)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)

    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def install(version, refused="nothing", more="", at=None):
        toolkit = tmp_path / f"cuda-{version}"
        script = NVCC.format(version=version, refused=refused, more=more, toolkit=toolkit)
        program(at or toolkit / "bin" / "nvcc", script)
        (toolkit / "libcudart_static.a").touch()
        for name in ("g++-14", "g++-13", "g++-12", "new-g++"):
            program(tmp_path / "bin" / name, "#!/bin/sh\n")

    return install


def find():
    return toolchain.find_cuda(["new-g++"])


def test_it_builds_for_each_chip_that_nvcc_knows_and_ptx_for_later_ones(toolkits):
    toolkits("12.4")
    assert find().built_for == ("sm_75", "sm_80", "sm_90", "compute_80")
    toolkits("12.9", more="compute_100 compute_120")
    assert find().built_for == ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_100")
    assert "-gencode 'arch=compute_80,code=[sm_80,sm_90]' " in find().compile


def test_a_toolkit_of_a_newer_major_version_than_the_driver_is_passed_over(toolkits, monkeypatch):
    toolkits("13.1")
    assert find().compiler == "nvcc 13.1"  # there is no driver, as where images are built
    monkeypatch.setattr(toolchain, "driver_version", lambda: (12, 4))
    assert "13.1, whose programs the driver that is here, made for CUDA 12.4, can't run: update" in find().left_out
    toolkits("12.9")
    assert find().compiler == "nvcc 12.9"
    assert "only on sm_75, sm_80, sm_90" in find().note
    monkeypatch.setattr(toolchain, "driver_version", lambda: (12, 9))
    assert find().note == ""


def test_a_compiler_that_nvcc_refuses_is_replaced_by_one_that_it_takes(toolkits):
    toolkits("12.4", refused="new-g++")
    assert "-ccbin g++-14 " in find().compile


def test_cuda_is_left_out_if_nvcc_takes_no_compiler(toolkits):
    toolkits("12.4", refused="")
    output = find().left_out
    assert "with new-g++ it says host_config.h: error: unsupported GNU version; with g++-14 it says" in output
    assert not find().compile


def test_an_nvcc_that_knows_none_of_our_chips_or_prints_nonsense_is_passed_over(toolkits, tmp_path):
    toolkits("12.4")
    nvcc = tmp_path / "cuda-12.4" / "bin" / "nvcc"
    nvcc.write_text(
        nvcc.read_text().replace("echo compute_70 compute_75 compute_80 compute_90", "printf '\\377'; exit 1;")
    )
    assert "knows none of the chips 75, 80" in find().left_out


def test_the_compiler_is_found_between_a_launcher_and_options(toolkits):
    toolkits("12.4")
    assert "-ccbin new-g++ " in toolchain.find_cuda(["env", "new-g++", "-I", "/usr/include"]).compile


def test_pips_config_settings_leave_cuda_out(toolkits, monkeypatch):
    toolkits("12.4")
    monkeypatch.setattr(setup.build_meta, "build_editable", lambda *_: toolchain.find_cuda(["new-g++"]))
    monkeypatch.setattr(setup.build_meta, "build_wheel", setup.build_meta.build_editable)
    for hook in (setup.build_wheel, setup.build_editable):
        monkeypatch.setattr(toolchain, "SETTINGS", {})
        assert hook("wheels", None).compile
        assert hook("wheels", {"cuda": "no"}).left_out == "--config-settings=cuda=no"
        with pytest.raises(SystemExit, match="cuda=maybe is unknown; cuda=no leaves CUDA kernels out"):
            hook("wheels", {"cuda": "maybe"})


@pytest.mark.parametrize(
    ("available", "limit", "jobs"),
    [(9, "max", 9), (9, f"{3 * 2**30}", 3), (9, None, 9), (99, "max", 16), (9, f"{2**30 - 1}", 1)],
)
def test_each_compiler_that_runs_has_a_gigabyte(monkeypatch, available, limit, jobs):
    meminfo = f"MemTotal: 1 kB\nMemAvailable: {available * 2**20} kB\n"
    files = {"/proc/meminfo": meminfo, "/sys/fs/cgroup/memory.max": limit}
    monkeypatch.setattr(os.path, "exists", lambda path: files[path] is not None)
    monkeypatch.setattr(setup, "Path", lambda path: SimpleNamespace(read_text=lambda: files[path]))
    assert setup.jobs_in_memory() == jobs


def test_a_build_that_says_nothing_counts_up(tmp_path, monkeypatch, capfd):
    """One file may take minutes, in which ninja prints nothing."""
    (tmp_path / "ninja").write_text("#!/bin/sh\nsleep 1\nexit $(cat status)\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "SILENCE", 0.2)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: f"{tmp_path}/ninja")
    Path("status").write_text("0")
    setup.run_ninja("")
    assert "mpkernels: compiles, 0 s so far\n" in capfd.readouterr().out
    Path("status").write_text("1")
    with pytest.raises(SystemExit, match="the build failed"):
        setup.run_ninja("")


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Build a library of two sources. Return a function that builds it again, and returns the names of the sources that
    were compiled."""
    ninja = shutil.which("ninja")
    if ninja is None:
        pytest.skip("ninja is missing")
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path("csrc").mkdir(exist_ok=True)
        Path("csrc", f"{name}_torch.cpp").write_text(f"int {name}() {{ return 1; }}\n")

    def build(cxx="g++"):
        os.makedirs(setup.BUILD, exist_ok=True)
        Path(setup.BUILD, "build.ninja").write_text(setup.ninja_file(cxx, toolchain.Cuda("none")))
        output = subprocess.run(
            [ninja, "-v", "-f", f"{setup.BUILD}/build.ninja"], capture_output=True, text=True, check=True
        ).stdout
        return [name for name in ("one", "two") if f"-c csrc/{name}_torch.cpp" in output]

    assert build() == ["one", "two"]
    return build


def test_what_was_compiled_is_not_compiled_again(built):
    assert built() == []
    Path("csrc/two_torch.cpp").write_text("int two() { return 2; }\n")
    assert built() == ["two"]
    assert built("g++ -g0") == ["one", "two"]
    assert built("g++ -g0") == []


def test_nothing_is_compiled_again_if_ninjas_logs_are_missing(built):
    """pip's own ninja may leave logs that another ninja can't read."""
    for log in (".ninja_log", ".ninja_deps"):
        Path(setup.BUILD, log).unlink(missing_ok=True)
    assert built() == []


def test_a_changed_header_is_noticed_if_ninjas_logs_are_missing(built):
    Path("csrc/common.h").write_text("\n")
    Path("csrc/one_torch.cpp").write_text('#include "common.h"\nint one() { return 1; }\n')
    assert built() == ["one"]
    Path(setup.BUILD, ".ninja_log").unlink()
    Path("csrc/common.h").write_text("// another\n")
    assert built() == ["one"]
