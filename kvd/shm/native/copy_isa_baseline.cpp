// The kernels for every CPU that kvd supports: SSE2 on x86-64, NEON and memcpy on aarch64.
#define KVD_ISA_TABLE kernels_baseline
#define KVD_ISA_NAME "baseline"
#include "copy_isa.inc"
