// The kernels compiled for avx512; see CMakeLists.txt for the flags. Empty on other architectures.
#if defined(__x86_64__)
#define KVD_ISA_TABLE kernels_avx512
#define KVD_ISA_NAME "avx512"
#include "copy_isa.inc"
#endif
