"""Each kind of processor has a name of its own."""

import platform

import pytest

from ppsd_rt.cpu.name import cpu_name

X86 = "".join(f"processor\t: {core}\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: avx2\n\n" for core in (0, 1))
ARM = "".join(f"processor\t: {core}\nCPU implementer\t: 0x41\nCPU part\t: {{}}\n\n" for core in (0, 1))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "Some CPU @ 2 GHz"),
        (ARM.format("0xd0c", "0xd0c"), f"{platform.machine()} 0x41/0xd0c"),
        (ARM.format("0xd05", "0xd0b"), f"{platform.machine()} 0x41/0xd05 0x41/0xd0b"),
        ("", platform.machine()),
    ],
)
def test_it_is_what_the_system_says(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_name(tmp_path / "cpuinfo") == name


def test_a_system_without_that_file_has_a_name_too(tmp_path):
    assert cpu_name(tmp_path / "none") != ""
