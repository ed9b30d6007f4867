"""Single PTX instructions, in the form that every Triton from 3.4 on compiles."""

import triton
import triton.language as tl


@triton.jit
def gdc_wait():
    """Waits until the kernels ahead have ended, where this one is a programmatic dependent."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def gdc_launch_dependents():
    """The next kernel's programs may begin."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def in_turn():
    """Memory is accessed in this order: the assembler moves no load across. Only the lanes of a warp meet."""
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
