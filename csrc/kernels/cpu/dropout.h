// Which weights of a tile dropout keeps: Philox for a vector of queries at once.
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// Lanes of 32 bits, those with even numbers and those with odd ones, as lower halves of lanes of 64. The upper halves
// hold anything: products do not read them.
struct SplitWords {
  LongWords even, odd;

  friend SplitWords operator^(SplitWords a, SplitWords b) { return {a.even ^ b.even, a.odd ^ b.odd}; }
  friend SplitWords operator^(SplitWords a, uint32_t b) { return {a.even ^ b, a.odd ^ b}; }
  friend SplitWords operator^(uint32_t a, SplitWords b) { return b ^ a; }
};

inline SplitWords split(Words x) {
  const LongWords lanes = std::bit_cast<LongWords>(x);
  return {lanes, lanes >> 32};
}
inline Words joined(SplitWords x) {
  return std::bit_cast<Words>((x.even & 0xffffffff) | x.odd << 32);
}
inline WideProduct<SplitWords> multiply_wide(SplitWords x, uint32_t m) {
  const LongWords even = multiply_lower(x.even, m), odd = multiply_lower(x.odd, m);
  return {{even >> 32, odd >> 32}, {even, odd}};
}

// Calls f(offset of the element in the tile, lanes that dropout keeps) for each vector of a span, or of every span.
// Dropout is on, and both the tile and its spans begin at a multiple of eight keys.
template <class T, class E, class F>
void each_kept(const Site<T, E>& site, const Panel<T, E>& panel, Index key, const Span span, F&& f) {
  static_assert(kTileKeys % 8 == 0 && kSpanKeys % 8 == 0);
  constexpr int kStep = kLanes<float>;
  const DropoutStream stream = site.dropout;
  const uint32_t dropped = uint32_t((uint64_t(stream.threshold) << 16) - 1);  // up to here, as the upper 16 bits
  const int first = span.vector * kLanes<T>, last = first + span.vectors * kLanes<T>;
  for (int lane = first; lane < last; lane += kStep) {
    Words row = Words{} + uint32_t(panel.first + lane);
    for (int n = 0; n < kStep; ++n) row[n] += n;
    for (int k = span.key; k < span.key + span.keys; k += 8) {
      const PhiloxWords<SplitWords> bits = philox(
          PhiloxCounter{uint32_t((key + k) / 8), split(row), stream.head, stream.batch}, stream.key0, stream.key1);
      for (int n = 0; n < std::min(8, span.key + span.keys - k); ++n) {
        const Words word = joined(bits.word[n / 2]);
        const Ints<float> kept = (n % 2 == 1 ? word : word << 16) > dropped;
        const Index offset = Index(k + n) * Panel<T, E>::kWidth + lane;
        if constexpr (kLanes<T> == kStep)
          f(offset, kept);
        else
          for (int part = 0; part < std::min(kStep, last - lane); part += kLanes<T>) {
            Ints<T> wide;
            for (int m = 0; m < kLanes<T>; ++m) wide[m] = kept[part + m];
            f(offset + part, wide);
          }
      }
    }
  }
}
template <class T, class E, class F>
void each_kept(const Site<T, E>& site, const Panel<T, E>& panel, Index key, const ScoreTile<T>& tile, F&& f) {
  for (int n = 0; n < tile.number_of_spans; ++n) each_kept(site, panel, key, tile.spans[n], f);
}

}  // namespace attention_ops
