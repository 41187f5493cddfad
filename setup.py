"""Builds the one native part: a shared object without Python.h, loaded by ctypes.

Every source file is compiled with the plain C++ compiler and its own instruction-set flags, so one binary holds all
levels and works with every Python; hence the wheel tag py3-none-<platform>.
"""

import os
import platform
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/pixelgate/pixels/native")
# -ffp-contract=off: a fused multiply-add would change the last bit of the normalisation.
FLAGS = shlex.split("-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra")
X86_FLAGS = {
    "level_avx2.cpp": ["-mavx2", "-mfma"],
    # GCC 12 takes its own intrinsics for reads of uninitialised variables
    "level_avx512.cpp": shlex.split(
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi"
        " -Wno-uninitialized -Wno-maybe-uninitialized"
    ),
}


class BuildKernels(build_ext):
    def build_extension(self, ext):
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        extra = shlex.split(os.environ.get("PIXELGATE_CXXFLAGS", ""))
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects = []
        for source in map(Path, ext.sources):
            target = Path(self.build_temp) / (source.stem + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            level = X86_FLAGS.get(source.name, []) if x86 else []
            self.run_compiler([*compiler, *FLAGS, *level, *extra, "-c", str(source), "-o", str(target)])
            objects.append(str(target))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        self.run_compiler([*compiler, "-shared", *extra, *objects, "-o", str(output)])

    def run_compiler(self, command):
        print(shlex.join(command))
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise SystemExit(f"pixelgate needs a C++17 compiler: {command[0]!r} was not found (set CXX).") from None
        except subprocess.CalledProcessError as failure:
            raise SystemExit(f"compiling the kernels failed with exit status {failure.returncode}") from None

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "pixelgate.pixels.kernels_native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.glob("*.hpp")),
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
