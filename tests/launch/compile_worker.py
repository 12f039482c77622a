"""Compiles one kernel for sm_90 through Triton's cache, as a rank does at its first step; prints a hash of the binary. With the argument
busy its first rename fails as on a disk that another rank holds."""

import errno
import hashlib
import os
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def _double(x, y):
    i = tl.arange(0, 128)
    tl.store(y + i, 2 * tl.load(x + i))


def busy(replace):
    def once(*paths):
        os.replace = replace
        raise OSError(errno.EBUSY, "Device or resource busy", *paths)

    return once


if __name__ == "__main__":
    if sys.argv[1:] == ["busy"]:
        os.replace = busy(os.replace)
    print("ready", flush=True)
    sys.stdin.readline()  # so that all start at once, on a busy machine too
    source = ASTSource(fn=_double, signature={"x": "*fp32", "y": "*fp32"}, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(hashlib.sha256(made.asm["cubin"]).hexdigest())
