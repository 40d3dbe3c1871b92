"""Facts about the processor, from a file of Linux or without one."""

import platform

import pytest

from levanter_infer.runtime import compile_cache, processor

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: A Processor @ 2.00GHz
stepping\t: 2
flags\t\t: fpu avx2 avx512f
vmx flags\t: vnmi

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: A Processor @ 2.00GHz
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n"
ANSWERS = (processor.processor_name, processor.model_name, processor.features)


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    """A file in the place of the system's."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", path)
    monkeypatch.setattr(platform, "machine", lambda: "isa64")
    monkeypatch.setattr(platform, "processor", lambda: "of the platform")
    for answer in ANSWERS:
        answer.cache_clear()
    yield path
    for answer in ANSWERS:
        answer.cache_clear()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            X86,
            [
                "isa64 GenuineIntel 6 207 A Processor @ 2.00GHz 2 fpu avx2 avx512f",
                "A Processor @ 2.00GHz",
                "flags\t\t: fpu avx2 avx512f",
            ],
        ),
        (ARM, ["isa64 fp asimd", "unknown", "Features\t: fp asimd"]),
        (None, ["isa64 of the platform", "of the platform", "of the platform"]),
    ],
    ids=["x86", "ARM", "no file"],
)
def test_the_processor_is_named(cpuinfo, text, names):
    if text is not None:
        cpuinfo.write_text(text)
    assert [answer() for answer in ANSWERS] == names


def test_the_directory_of_compiled_programs_keeps_its_name(cpuinfo):
    """Another name would leave every user's compile cache behind."""
    cpuinfo.write_text(X86)
    assert compile_cache._machine() == "2d848c32c3540054"
