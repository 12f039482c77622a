"""Compile every launch of a piece of code for sm_90 without a GPU: registers, spills, shared memory of each kernel variant.

Not a test itself: `test_sm90.py` runs it in a process of its own, since Triton's interpreter must be off here and is on there. The
launchers run as they are, on CPU tensors; only the launch is replaced by a compilation with the types, divisibilities and constants that
Triton's own launcher would see.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448  # bytes a block
DTYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compilations:
    """with Compilations() as c: call launchers; c.rows is then a list of dicts, one a distinct variant."""

    def __init__(self):
        self.rows, self._seen = [], set()

    def __enter__(self):
        self._original = JITFunction.__getitem__
        JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: self._compile(kernel, args, kwargs)
        return self

    def __exit__(self, *_):
        JITFunction.__getitem__ = self._original

    def _compile(self, kernel, args, kwargs):
        options = {n: x for n in OPTIONS if (x := kwargs.pop(n, None)) is not None}
        signature, constants, attributes = {}, {}, {}
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for place, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = _type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, str(signature), str(constants), str(attributes), str(options))
        if key not in self._seen:
            self._seen.add(key)
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            compiled = triton.compile(source, target=TARGET, options=options)
            flags = {n: v for n, v in constants.items() if v is not None} | options
            self.rows.append({"kernel": kernel.__name__, "flags": flags, "shared": compiled.metadata.shared} | _resources(compiled))


def _type(value) -> str:
    if isinstance(value, torch.Tensor):
        return DTYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(compiled) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(TARGET.arch).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    spilled = sum(int(n) for n in re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups())
    found = {"registers": registers, "spilled": spilled, "wgmma": compiled.asm["ptx"].count("wgmma.mma_async")}
    return found | _faults(compiled.asm["ptx"], compiled.asm["ttgir"])


def _faults(ptx: str, ttgir: str) -> dict:
    """Two faults of the tools on Hopper (kernels/LOG.md). unfenced: products in whose sight shared memory was written without first the
    fence, then a barrier, so that they can read a right operand before other warps' stores are seen; not those whose operands in shared
    memory were all copied there asynchronously, which need none. narrow: 16-bit products with right operands of fewer than 64 columns."""
    wanted = r"st\.shared|stmatrix|fence\.proxy\.async|bar\.sync|wgmma\.commit_group|wgmma\.mma_async\.sync\.aligned\.m64n\d+k16"
    copied = iter(_copied(ttgir))
    written, fenced, unfenced, narrow = False, False, 0, 0
    for mark in re.findall(wanted, ptx):
        if mark.startswith("st"):
            written, fenced = True, False
        elif mark.startswith("fence"):
            fenced = True
        elif mark.startswith("bar"):
            written = written and not fenced
        elif mark == "wgmma.commit_group":  # one a product
            unfenced += not next(copied) and written
        else:
            narrow += int(re.search(r"n(\d+)k", mark).group(1)) < 64
    return {"unfenced": unfenced, "narrow": narrow, "unordered": _unordered(ptx)}


def _unordered(ptx: str) -> int:
    """Atomics by which one thread counts for its program (`kernels.sums`), without a barrier between the other threads' stores before and
    the atomic, or between the atomic and their loads after: no run tells, but for a rare one on a GPU."""
    stored, counted, unordered = False, False, 0
    for mark in re.findall(r"st\.global|ld\.global|bar\.sync|atom\.global\.gpu\.acq_rel", ptx):
        if mark == "bar.sync":
            stored, counted = False, False
        elif mark == "st.global":
            stored = True
        elif mark == "ld.global":
            unordered += counted
        else:
            unordered += stored
            counted = True
    return unordered


def _copied(ttgir: str) -> list[bool]:
    """Of each product in order, whether asynchronous copies alone fill the buffers that it reads from shared memory."""
    lines, buffer, copied, stored, products = ttgir.splitlines(), {}, set(), set(), []
    for number, line in enumerate(lines):  # in order: loops use names again
        if view := re.search(r"(%\S+) = ttg\.memdesc_\w+ (%[^\s\[,]+)", line):
            buffer[view[1]] = buffer.get(view[2], view[2])
        elif made := re.search(r"(%\S+) = ttg\.local_alloc", line):
            buffer[made[1]] = number
        elif copy := re.search(r"ttg\.async_copy_global_to_local %\S+, (%\S+)", line):
            copied.add(buffer[copy[1]])
        elif store := re.search(r"ttg\.local_store %\S+, (%\S+)", line):
            stored.add(buffer[store[1]])
        elif product := re.search(r"= ttng\.warp_group_dot (%\S+), (%\S+), .*?} : (tensor)?", line):
            products.append([buffer[x] for x in product.groups()[product[3] is not None : 2]])
    return [all(x in copied - stored for x in read) for read in products]


def variants(what: str) -> list[dict]:
    """The op's forward and backward, launch by launch, on CPU tensors whose values nothing reads."""
    from kernels.chunk_triton import Call, _DeltaRule
    from kernels.layout import chunk_rows, layout

    dtype = torch.float32 if "fp32" in what else torch.bfloat16
    H, K, V = (3, 120, 104) if "odd" in what else (1, 256, 256) if "wide" in what else (4, 128, 128)
    T, device = 32768 if "long" in what else 128, torch.device("cpu")  # long: cut into pieces
    flags = [("channel" in what or "odd" in what, False)] if "plain" in what else [(True, True)]
    with Compilations() as compilations:
        for decay, precondition in flags:
            q, k, v = (torch.zeros(1, T, H, D, dtype=dtype, requires_grad=True) for D in (K, K, V))
            gate, decays = torch.zeros(1, T, H), torch.zeros(1, T, H, K) if "channel" in what else torch.zeros(1, T, H)
            call = Call(layout(1, T, None, chunk_rows(k), H, device), 1.0, True, 0.4, 1e-6, None)
            gates = (gate, gate, torch.zeros(H)) if precondition else (None,) * 3
            o, s, _ = _DeltaRule.apply(call, q, k, v, gate, decays if decay else None, *gates, None, None)
            torch.autograd.grad((o.sum() + s.sum()).float(), [q, k, v])
    return compilations.rows


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps([row | {"flags": {n: str(x) for n, x in row["flags"].items()}} for row in variants(sys.argv[1])]))
