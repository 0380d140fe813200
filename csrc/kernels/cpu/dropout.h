// Which weights of a tile dropout keeps: Philox for a vector of queries at once.
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// Lanes of 32 bits times m: those with even numbers, and those with odd ones, as lanes of 64.
inline WideProduct<Words> multiply_wide(Words x, uint32_t m) {
  const LongWords lanes = std::bit_cast<LongWords>(x), upper = LongWords{} + 0xffffffff00000000;
  const LongWords even = multiply_lower(lanes, m), odd = multiply_lower(lanes >> 32, m);
  return {std::bit_cast<Words>(even >> 32 | (odd & upper)), std::bit_cast<Words>((even & ~upper) | odd << 32)};
}

// keep[key][lane] = -1 where dropout keeps the element, else 0.
template <class T, class E>
void fill_kept(LaneInt<T>* keep, const Site<T, E>& site, const Panel<T, E>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, E>::kWidth, kStep = kLanes<float>;
  const DropoutStream& stream = site.dropout;
  const auto words = [](Index x) { return Words{} + uint32_t(x); };
  Words row = words(panel.first);
  for (int lane = 0; lane < kStep; ++lane) row[lane] += lane;
  for (Index group = key / 8; group <= (key + keys - 1) / 8; ++group)
    for (int q = 0; q < kWidth; q += kStep) {
      const PhiloxWords<Words> bits = philox(words(group), row + uint32_t(q), words(stream.head), words(stream.batch),
                                             stream.key0, stream.key1, multiply_wide);
      for (int n = 0; n < 8; ++n) {
        const Index k = group * 8 + n - key;
        if (k < 0 || k >= keys) continue;
        const Ints<float> kept = ((bits.word[n / 2] >> (16 * (n % 2))) & 0xffff) >= stream.threshold;
        LaneInt<T>* to = keep + k * kWidth + q;
        if constexpr (sizeof(T) == sizeof(float))
          store_lanes<T>(to, kept);
        else
          for (int lane = 0; lane < std::min(kStep, kWidth - q); ++lane) to[lane] = kept[lane];
      }
    }
}

// x = keep ? factor * x : 0
template <class T, int Width>
void apply_kept(T* x, const ScoreTile<T>& tile, const LaneInt<T>* keep, T factor) {
  each_vector<T, Width>(
      tile, [&](Index n, int) { store(x + n, load_lanes<T>(keep + n) ? splat(factor) * load(x + n) : Vec<T>{}); });
}

}  // namespace attention_ops
