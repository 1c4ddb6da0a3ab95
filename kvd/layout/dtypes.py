"""The element types a KV cache may be kept in, their names and their sizes.

Pure. Names are the ones torch prints, without the `torch.` in front. A type that is not in the table is
refused by name: a wrong element size would make every size and offset of a cache wrong without anyone
noticing.
"""

from __future__ import annotations

from kvd.errors import UsageError

DTYPE_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "int8": 8,
    "uint8": 8,
    "float4_e2m1fn": 4,
    "int4": 4,
    "uint4": 4,
}

_SPELLINGS = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}


def dtype_bits(dtype: str, *, field: str = "dtype") -> int:
    """Bits of one element of `dtype`. Raises UsageError(dtype) naming `field` and what is allowed."""
    if isinstance(dtype, str) and dtype in DTYPE_BITS:
        return DTYPE_BITS[dtype]
    plain = str(dtype).removeprefix("torch.")  # a torch.dtype too: most hold one
    hint = plain if plain in DTYPE_BITS else _SPELLINGS.get(plain.lower(), "")
    meant = f"; write {hint!r}" if hint else ""
    raise UsageError(
        f"{field} {dtype!r} is not an element type kvd knows{meant}; allowed: {', '.join(DTYPE_BITS)}",
        code="dtype", field=field, value=str(dtype),
    )  # fmt: skip
