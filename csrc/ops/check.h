// What the checks of every operator share. One grammar for all messages:
//   operator: expected argument property wanted [as in other argument], got actual
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace attention_ops {

// Asks a condition on sizes. Under tracing, where a size may be a symbol: `holds` lets the trace assert it, `surely`
// answers false if it cannot be known.
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}
inline bool surely(const c10::SymBool& condition) {
  return condition.guard_or_false(__FILE__, __LINE__);
}

inline bool same(const c10::SymInt& a, const c10::SymInt& b) {
  return holds(a.sym_eq(b));
}

// One size against another that it may broadcast to.
inline bool broadcasts(const c10::SymInt& size, const c10::SymInt& to) {
  return surely(size.sym_eq(to)) || surely(size.sym_eq(1)) || holds(size.sym_eq(to));
}

inline std::string_view type_name(at::ScalarType type) {
  return c10::getDtypeNames(type).first;
}

inline bool is_attention_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

inline void check_device(const char* op, std::string_view name, const at::Tensor& x, const at::Tensor& query) {
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, op, ": expected ", name, " layout Strided, got ", x.layout());
  TORCH_CHECK_VALUE(x.device() == query.device(), op, ": expected ", name, " device ", query.device(),
                    " as in query, got ", x.device());
}

// Kernels count positions with 32 bits. A symbol is not compared: an export would ask its caller for the bound.
inline void check_length(const char* op, std::string_view name, const c10::SymInt& length) {
  const auto known = length.maybe_as_int();
  TORCH_CHECK_VALUE(!known || *known < (int64_t(1) << 31), op, ": expected ", name, " length below 2147483648, got ",
                    length);
}

}  // namespace attention_ops
