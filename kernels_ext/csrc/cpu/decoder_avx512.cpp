#define KERNELS_ISA avx512
#include "decoder_kernels.inl"
