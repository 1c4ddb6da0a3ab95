"""Looks at the instructions that a stopped process executes next (ptrace, x86-64).

The two full fences of the lease protocol matter once in about 1e8 operations: no test of behaviour finds one missing in
reasonable time. That the protocol needs them is shown by tests/model; that they are executed is seen here.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PEEKTEXT, _SINGLESTEP, _GETREGS, _ATTACH = 1, 9, 12, 16
_RIP = 16
# What compilers make of a sequentially consistent fence: mfence, or a locked no-op on the stack.
FENCES = (b"\x0f\xae\xf0", b"\xf0\x48\x83\x0c\x24\x00", b"\xf0\x83\x0c\x24\x00", b"\xf0\x48\x83\x4c\x24")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int, address: int | None = None, data: object = None) -> int:
    ctypes.set_errno(0)
    value = int(_libc.ptrace(request, pid, address, data))
    if ctypes.get_errno():
        raise OSError(ctypes.get_errno(), "ptrace")
    return value


def count_fences(pid: int, instructions: int) -> int:
    """Single-step a child of this process that stopped itself; how many fences it executes. Then it is killed.

    Raises OSError if tracing is not allowed.
    """
    _ptrace(_ATTACH, pid)
    os.waitpid(pid, 0)
    registers = (ctypes.c_ulonglong * 27)()
    fences = 0
    try:
        for _ in range(instructions):
            _ptrace(_GETREGS, pid, None, ctypes.addressof(registers))
            rip = registers[_RIP]
            code = _ptrace(_PEEKTEXT, pid, rip).to_bytes(8, "little", signed=True)
            fences += code.startswith(FENCES)
            _ptrace(_SINGLESTEP, pid)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSTOPPED(status):
                break
    finally:
        os.kill(pid, signal.SIGKILL)
    return fences
