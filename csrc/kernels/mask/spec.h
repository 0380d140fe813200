// What a mask is made of: the facts of a kind, a parsed expression, and the parser's result type. Torch-free.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace attention_ops {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// One number or word between the parentheses of a kind.
struct ArgumentInfo {
  std::string_view name;
  int64_t minimum = std::numeric_limits<int64_t>::min();
  std::vector<std::string_view> words = {};  // a word stands for its position here
  bool may_be_unbounded = false;
  bool has_default = false;  // 0
};

// One tensor that a kind takes from the list. Axes: B batch, H heads, q queries, k keys, L both (which must be equal),
// r and c blocks of queries and of keys (the first argument is the block's edge).
struct DataInfo {
  std::string_view name, axes;
  bool is_integer;  // int64, else bool
};

struct KindInfo {
  std::string_view name;
  std::vector<ArgumentInfo> arguments = {};
  std::vector<DataInfo> data = {};
};

struct MaskLeaf {
  int kind;
  std::vector<int64_t> arguments;
};

// An expression in postfix order: a leaf's number, or one of the operations.
struct MaskSpec {
  static constexpr int kAnd = -1, kOr = -2;
  std::vector<MaskLeaf> leaves = {};
  std::vector<int> program = {};

  // The most operands that wait at once.
  int depth() const {
    int now = 0, most = 0;
    for (const int step : program) most = std::max(most, now += step >= 0 ? 1 : -1);
    return most;
  }
};

}  // namespace attention_ops
