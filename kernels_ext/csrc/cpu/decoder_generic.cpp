#define KERNELS_ISA generic
#include "decoder_kernels.inl"
