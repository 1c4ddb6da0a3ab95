// The kernels compiled for avx2; see CMakeLists.txt for the flags. Empty on other architectures.
#if defined(__x86_64__)
#define KVD_ISA_TABLE kernels_avx2
#define KVD_ISA_NAME "avx2"
#include "copy_isa.inc"
#endif
