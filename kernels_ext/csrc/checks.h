// Argument checks shared by the ops' bindings. Each message says what was wrong, what was expected and what
// came. The ops throw, torch turns that into a RuntimeError; the Python wrappers check the same things first
// and raise ValueError, so these guard direct calls through torch.ops.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_string(const Tensor& t) {
  std::ostringstream out;
  out << '[';
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << ']';
  return out.str();
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim) {
  STD_TORCH_CHECK(t.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got shape ", shape_string(t));
}

// `what` names the expected size in the caller's terms, e.g. "K of the weight".
inline void check_size(const char* op, const char* name, const Tensor& t, int64_t dim, int64_t want,
                       const char* what) {
  STD_TORCH_CHECK(t.size(dim) == want, op, ": ", name, " has shape ", shape_string(t), ", but dimension ", dim,
                  " must be ", want, " (", what, ")");
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType want) {
  STD_TORCH_CHECK(t.scalar_type() == want, op, ": ", name, " must be ", toString(want), ", got ",
                  toString(t.scalar_type()));
}

}  // namespace kernels
