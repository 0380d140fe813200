// Reads mask expressions: "causal & sliding_window(255, 0) | global_tokens".
#pragma once
#include <cctype>
#include <charconv>
#include <stdexcept>
#include <string>

#include "kernels/mask/mask.h"

namespace attention_ops {

class MaskParser {
 public:
  explicit MaskParser(std::string_view text) : text_(text), rest_(text) {}

  MaskSpec parse() {
    if (at_end()) return {};
    either();
    if (!at_end())
      fail("expected mask with '&', '|' or its end after '" + before() + "', got '" + std::string(rest_) + "'");
    return std::move(spec_);
  }

 private:
  [[noreturn]] static void fail(const std::string& message) { throw std::invalid_argument(message); }

  char peek() {
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_[0]))) rest_.remove_prefix(1);
    return rest_.empty() ? 0 : rest_[0];
  }
  bool take(char c) {
    if (peek() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool at_end() {
    peek();
    return rest_.empty();
  }
  std::string before() const { return std::string(text_.substr(0, text_.size() - rest_.size())); }

  void either() {
    both();
    while (take('|')) both(), spec_.program.push_back(MaskSpec::kOr);
  }
  void both() {
    one();
    while (take('&')) one(), spec_.program.push_back(MaskSpec::kAnd);
  }
  void one() {
    if (!take('(')) return leaf();
    if (++depth_ > kMaxMaskLeaves) fail("expected mask with at most 16 nested parentheses, got more");
    either();
    if (!take(')')) fail("expected mask with ')' after '" + before() + "', got '" + std::string(rest_) + "'");
    --depth_;
  }

  std::string_view word() {
    peek();
    size_t n = 0;
    while (n < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[n])) || rest_[n] == '_' ||
                                rest_[n] == '-' || rest_[n] == '+'))
      ++n;
    const std::string_view found = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return found;
  }

  void leaf() {
    const std::string_view name = word();
    int kind = 0;
    while (kind < kMaskKinds && kind_info(kind).name != name) ++kind;
    if (kind == kMaskKinds)
      fail("expected mask kind " + kinds() + ", got '" + std::string(name.empty() ? rest_ : name) + "'");
    if (spec_.leaves.size() == kMaxMaskLeaves) fail("expected mask with at most 16 kinds, got more");
    spec_.program.push_back(static_cast<int>(spec_.leaves.size()));
    spec_.leaves.push_back({kind, arguments(kind_info(kind))});
  }

  static std::string kinds() {
    std::string names;
    for (int kind = 0; kind < kMaskKinds; ++kind) names += (kind ? ", " : "") + std::string(kind_info(kind).name);
    return names;
  }

  std::vector<int64_t> arguments(const KindInfo& info) {
    std::vector<int64_t> values;
    if (take('(') && !take(')')) {
      do {
        if (values.size() == info.arguments.size()) fail(count(info) + ", got more");
        values.push_back(argument(info, info.arguments[values.size()]));
      } while (take(','));
      if (!take(')')) fail("expected mask with ')' after '" + before() + "', got '" + std::string(rest_) + "'");
    }
    for (size_t n = values.size(); n < info.arguments.size(); ++n) {
      if (!info.arguments[n].has_default) fail(count(info) + ", got " + std::to_string(n));
      values.push_back(0);
    }
    return values;
  }

  static std::string count(const KindInfo& info) {
    std::string names;
    for (const ArgumentInfo& a : info.arguments) names += (names.empty() ? "" : ", ") + std::string(a.name);
    return "expected mask " + std::string(info.name) + " with arguments (" + names + ")";
  }

  int64_t argument(const KindInfo& info, const ArgumentInfo& wanted) {
    const std::string_view text = word();
    for (size_t n = 0; n < wanted.words.size(); ++n)
      if (wanted.words[n] == text) return static_cast<int64_t>(n);
    if (wanted.may_be_unbounded && text == "unbounded") return kUnbounded;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (!wanted.words.empty() || error != std::errc() || end != text.data() + text.size() || value < wanted.minimum)
      fail("expected mask " + std::string(info.name) + " with " + std::string(wanted.name) + " " + wish(wanted) +
           ", got '" + std::string(text.empty() ? rest_ : text) + "'");
    return value;
  }

  static std::string wish(const ArgumentInfo& wanted) {
    if (!wanted.words.empty()) {
      std::string text;
      for (const auto w : wanted.words) text += (text.empty() ? "" : " or ") + std::string(w);
      return text;
    }
    if (wanted.may_be_unbounded) return "an integer or unbounded";
    return wanted.minimum > 0 ? "an integer >= " + std::to_string(wanted.minimum) : "an integer";
  }

  std::string_view text_, rest_;
  MaskSpec spec_;
  int depth_ = 0;
};

// Throws std::invalid_argument with a sentence that says what was expected.
inline MaskSpec parse_mask(std::string_view text) {
  return MaskParser(text).parse();
}

}  // namespace attention_ops
