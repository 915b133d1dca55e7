// Helpers shared by the CUDA bindings (binding_*.cpp): the current stream, and launch errors with a reason.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

namespace kernels {

// The stream torch is queueing work on for the tensor's device.
inline cudaStream_t current_stream(const torch::stable::Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_same_device(const char* op, const char* name, const torch::stable::Tensor& t, const char* like_name,
                              const torch::stable::Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), op, ": ", name, " must be on ",
                  like_name, "'s device, cuda:", like.get_device_index());
}

inline void check_launch(const char* op, cudaError_t error) {
  // Reset the thread's last error, so that the next op does not report this one again.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  STD_TORCH_CHECK(error != cudaErrorNoKernelImageForDevice, op,
                  ": this build has no kernel for this GPU's architecture. Rebuild with -C "
                  "cmake.define.CMAKE_CUDA_ARCHITECTURES=native, or choose another backend.");
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

}  // namespace kernels
