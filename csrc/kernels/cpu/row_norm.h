// What turns a row's scores into weights: p = 2^(s - base - log2_l). lse gives it at once, base = lse and log2_l = 0,
// unless lse is so large that its last digit would show in p: then both are counted again from the scores.
#pragma once
#include <cmath>

#include "kernels/cpu/score.h"

namespace attention_ops {

template <class T>
struct RowNorm {
  T *base = nullptr, *log2_l = nullptr;  // one for each lane of a panel

  // log2 p of a vector of scores
  Vec<T> log2_weight(Vec<T> s, Index lane) const { return s - load(base + lane) - load(log2_l + lane); }
};

template <class T>
bool is_coarse(T lse) {
  return std::isfinite(lse) && std::abs(lse) > 1024;
}

// m = max s and l = sum 2^(s - m) over the keys of a panel, the sink included.
template <class T, class E>
void count_rows(const RowNorm<T>& norm, ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel) {
  const Problem<T, E>& p = site.of;
  constexpr int kVectors = Panel<T, E>::kVectors;
  Vec<T> m[kVectors], l[kVectors];
  const T sink = site.sink();
  for (int v = 0; v < kVectors; ++v) m[v] = splat(sink), l[v] = splat(T(sink != -kInfinity<T>));
  for (Index key = 0; key < p.keys; key += kTileKeys) {
    const int keys = int(std::min<Index>(kTileKeys, p.keys - key));
    if (compute_scores(tile, site, panel, key, keys) == Cover::none) continue;
    each_vector<T, Panel<T, E>::kWidth>(tile, [&](Index n, int lane) {
      const int v = lane / kLanes<T>;
      const Vec<T> s = load(tile.s + n), top = max(s, m[v]), base = top == splat(-kInfinity<T>) ? Vec<T>{} : top;
      l[v] = fma(l[v], rescale<T>(m[v], base), exp2<T, E>(s - base));
      m[v] = top;
    });
  }
  for (int lane = 0; lane < Panel<T, E>::kWidth; ++lane) {
    const T top = m[lane / kLanes<T>][lane % kLanes<T>], sum = l[lane / kLanes<T>][lane % kLanes<T>];
    norm.base[lane] = top == -kInfinity<T> ? 0 : top;
    norm.log2_l[lane] = sum == 0 ? 0 : std::log2(sum);
  }
}

// `lse` holds the panel's rows.
template <class T, class E>
void find_row_norm(const RowNorm<T>& norm, const T* lse, ScoreTile<T>& tile, const Site<T, E>& site,
                   const Panel<T, E>& panel) {
  if (std::any_of(lse, lse + panel.count, is_coarse<T>)) count_rows(norm, tile, site, panel);
  for (int lane = 0; lane < Panel<T, E>::kWidth; ++lane) {  // an empty row has no finite score either
    if (lane < panel.count && is_coarse(lse[lane])) continue;
    norm.base[lane] = lane < panel.count && lse[lane] != -kInfinity<T> ? lse[lane] * kLog2e<T> : 0;
    norm.log2_l[lane] = 0;
  }
}

}  // namespace attention_ops
