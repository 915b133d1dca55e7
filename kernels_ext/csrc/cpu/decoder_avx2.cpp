#define KERNELS_ISA avx2
#include "decoder_kernels.inl"
