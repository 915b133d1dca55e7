// Launches with programmatic dependent launch, and what both sides of it do.
//
// A kernel launched by launch_overlapped may start while the one before it in the stream still runs. It calls
// begin_dependent() before it reads or writes global memory: that waits until everything before has finished and is
// visible, and lets the next kernel's blocks be scheduled early in turn. Before compute capability 9.0 both are
// ordinary launches.
#pragma once

#include <cuda_runtime.h>

#include "ptx.cuh"

namespace kernels {

__device__ __forceinline__ void begin_dependent() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
#endif
}

inline cudaError_t device_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(value, attribute, device);
}

// `cluster_z` blocks along z form a cluster; more than 1 needs compute capability 9.0.
template <typename... Parameters>
cudaError_t launch_overlapped_clusters(void (*kernel)(Parameters...), dim3 grid, unsigned cluster_z, dim3 block,
                                       size_t shared_bytes, cudaStream_t stream, Parameters... arguments) {
  int major = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrComputeCapabilityMajor, &major); error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (major >= 9) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_z > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 1;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = cluster_z;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                              cudaStream_t stream, Parameters... arguments) {
  return launch_overlapped_clusters(kernel, grid, 1, block, shared_bytes, stream, arguments...);
}

}  // namespace kernels
