"""Builds the optional C++ kernels for CPUs; everything else is in pyproject.toml."""

import importlib.util
import itertools
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/levanter_infer/kernels/cpu/native")


def native_kernels() -> list[Extension]:
    jaxlib = importlib.util.find_spec("jaxlib")
    if sys.platform == "win32" or jaxlib is None or jaxlib.origin is None:
        return []
    digest = runpy.run_path(str(NATIVE.parent / "sources.py"))["digest"]
    return [
        Extension(
            "levanter_infer.kernels.cpu._native",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cc"))],
            depends=[str(path) for path in sorted(NATIVE.iterdir())],
            define_macros=[("LEVANTER_INFER_SOURCES", f'"{digest(NATIVE)}"')],
            include_dirs=[str(Path(jaxlib.origin).parent / "include")],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",  # Python's own flags ask for debug information, seven times the code itself
                "-ffp-contract=fast",
                "-fvisibility=hidden",
                "-Wno-psabi",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # a machine without a compiler installs the package all the same
        )
    ]


class ParallelBuild(build_ext):
    """Compiles the files of an extension side by side."""

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], **options) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                return list(itertools.chain(*threads.map(lambda each: compile_files([each], **options), sources)))

        self.compiler.compile = compile_in_parallel
        super().build_extension(ext)


setup(ext_modules=native_kernels(), cmdclass={"build_ext": ParallelBuild})
