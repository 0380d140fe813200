// The arguments that every public operator starts with: checked, filled with defaults, and brought to four dimensions.
#pragma once
#include "ops/ops.h"

#include <string>
#include <vector>

namespace attention_ops {

// As the user gave them. Operators that return weights have no value.
struct Arguments {
  const char* op;
  In query, key;
  const Tensor* value;
  Opt bias, distance_bias, relative_key, relative_value, sinks;
  at::TensorList mask_data;
  std::string_view mask;
  std::optional<double> scale, softcap;
};

class Inputs {
 public:
  explicit Inputs(const Arguments& arguments);

  // `value` of the private operators; of width 0 where the user gives none, so that it costs nothing.
  Attention attention(double dropout_p = 0, Opt seed = kNone) const {
    return {query, key, value, bias, distance, sinks, mask_data, mask, scale, softcap, dropout_p, seed};
  }

  // Splits the batch of a result again into the dimensions the user has before the heads, if any.
  Tensor restore(const Tensor& x, bool has_heads = true) const;

  static inline const OptionalTensor kNone{};

  const char* op;
  int64_t rank;                      // dimensions of the widest of query, key and value
  std::vector<c10::SymInt> leading;  // sizes before the heads; one of size 1 where the user has none
  Tensor query, key, value;          // [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]
  c10::SymInt B, H, Hkv, Lq, Lk;
  OptionalTensor bias, distance, sinks;
  std::vector<Tensor> mask_data;
  std::string_view mask;
  double scale, softcap;

 private:
  void check_types(const Arguments& a) const;
  void bring_to_four_dimensions(const Arguments& a);
  void check_sizes() const;
  void take_bias_and_sinks(const Arguments& a);
  void take_distance(const Arguments& a);
  void take_mask(const Arguments& a);
  void take_numbers(const Arguments& a);
  Tensor fold_leading(Tensor x, const std::string& name, size_t axes) const;
  Tensor align(const Tensor& x, const std::string& name, std::string_view axes, int64_t block) const;
  c10::SymInt size_of(char axis, int64_t block) const;
};

}  // namespace attention_ops
