// Argument checks shared by the ops' bindings. Each message says what was wrong, what was expected and what
// came. They throw std::invalid_argument, which Python sees as a ValueError, so that an op which must be cheap to
// call needs no second set of checks in Python.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void throw_value_error(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Throws unless the condition holds; the message's parts are evaluated only then.
#define KERNELS_CHECK(condition, ...)                            \
  do {                                                           \
    if (!(condition)) ::kernels::throw_value_error(__VA_ARGS__); \
  } while (false)

inline std::string shape_string(const Tensor& t) {
  std::ostringstream out;
  out << '[';
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << ']';
  return out.str();
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  KERNELS_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim) {
  KERNELS_CHECK(t.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got shape ", shape_string(t));
}

// `what` names the expected size in the caller's terms, e.g. "K of the weight".
inline void check_size(const char* op, const char* name, const Tensor& t, int64_t dim, int64_t want,
                       const char* what) {
  KERNELS_CHECK(t.size(dim) == want, op, ": ", name, " has shape ", shape_string(t), ", but dimension ", dim,
                " must be ", want, " (", what, ")");
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType want) {
  KERNELS_CHECK(t.scalar_type() == want, op, ": ", name, " must be ", toString(want), ", got ",
                toString(t.scalar_type()));
}

}  // namespace kernels
