"""Compiles the extension in the current folder as setup.py does, but with g++ in nvcc's place and the emulation in the
chip's. tests/proof/standin runs it."""

import runpy
import sys
from pathlib import Path

import toolchain
from tests.proof import emulation

COMPILER = "the emulation of nvcc 13.2"  # newer than torch's runtime, as drivers may be older than the toolkit


def main(includes: str, *linked: str) -> None:
    setup = runpy.run_path("setup.py", run_name="extension")
    chips = toolchain.ARCHS  # and the virtual chip of each one's code
    cuda = toolchain.Cuda(
        compiler=COMPILER,
        built_for=(*(f"sm_{chip}" for chip in chips), f"compute_{max(map(int, chips.values()))}"),
        compile=" ".join(["g++ -x c++", *emulation.FLAGS]),  # without KERNEL_FLAGS: other tests look for races
        includes=f"-DMPK_CUDA {includes}",
        libraries=" ".join(["-Wl,-Bsymbolic", *linked]),
    )
    Path(setup["LIBRARY"]).unlink(missing_ok=True)  # ninja wouldn't notice that ``linked`` has changed
    setup["build_library"](toolchain.find_cxx(), cuda, Path("mpkernels/_native.so"))


if __name__ == "__main__":
    main(*sys.argv[1:])
