// Philox4x32-10 (Salmon et al. 2011): a random function of a counter, and dropout's use of it.
#pragma once
#include <cstdint>

#include "kernels/host_device.h"

namespace attention_ops {

// W is a number of 32 bits, or one for each lane (SplitWords).
template <class W>
struct PhiloxWords {
  W word[4];
};
using Philox = PhiloxWords<uint32_t>;

// The halves of a product of 64 bits.
template <class W>
struct WideProduct {
  W high, low;
};
HOST_DEVICE inline WideProduct<uint32_t> multiply_wide(uint32_t a, uint32_t b) {
  const uint64_t product = uint64_t(a) * b;
  return {uint32_t(product >> 32), uint32_t(product)};
}

// Each word is a number, which all lanes share, or a vector.
template <class W0, class W1, class W2, class W3>
struct PhiloxCounter {
  W0 c0;
  W1 c1;
  W2 c2;
  W3 c3;
};
template <class W0, class W1, class W2, class W3>
PhiloxCounter(W0, W1, W2, W3) -> PhiloxCounter<W0, W1, W2, W3>;

template <class Counter>
HOST_DEVICE inline auto philox_round(const Counter& c, uint32_t& key0, uint32_t& key1) {
  const auto a = multiply_wide(c.c0, 0xD2511F53u);
  const auto b = multiply_wide(c.c2, 0xCD9E8D57u);
  const PhiloxCounter next{b.high ^ c.c1 ^ key0, b.low, a.high ^ c.c3 ^ key1, a.low};
  key0 += 0x9E3779B9u;
  key1 += 0xBB67AE85u;
  return next;
}

// After four rounds no word of a counter with a vector is a number any more.
template <class Counter>
HOST_DEVICE inline auto philox(const Counter& counter, uint32_t key0, uint32_t key1) {
  const auto first = philox_round(counter, key0, key1);
  const auto second = philox_round(first, key0, key1);
  auto c = philox_round(philox_round(second, key0, key1), key0, key1);
  for (int round = 4; round < 10; ++round) c = philox_round(c, key0, key1);
  return PhiloxWords<decltype(c.c0)>{{c.c0, c.c1, c.c2, c.c3}};
}

// The stream of one batch and head. Counter (j / 8, i, head, batch) gives the 16 bits of eight neighbouring keys.
struct DropoutStream {
  uint32_t key0, key1, head, batch;
  uint32_t threshold;  // keep where bits >= threshold

  HOST_DEVICE Philox eight(uint32_t i, uint32_t group) const {
    return philox(PhiloxCounter{group, i, head, batch}, key0, key1);
  }
  HOST_DEVICE bool keeps(const Philox& bits, int n) const {
    return ((bits.word[n / 2] >> (16 * (n % 2))) & 0xffff) >= threshold;
  }
};

// A seed per call, or a seed and a batch number per row. What is dropped is a share of p to 16 bits.
struct Dropout {
  uint32_t threshold = 0;
  double scale = 1;  // the inverse of the share that is kept
  const int64_t* seed = nullptr;
  bool per_row = false;

  Dropout() = default;
  Dropout(double p, const int64_t* seed, bool per_row)
      : threshold(static_cast<uint32_t>(p * 65536 + 0.5)),
        scale(threshold < 65536 ? 65536. / (65536 - threshold) : 0),
        seed(seed),
        per_row(per_row) {}

  HOST_DEVICE bool on() const { return threshold > 0; }
  HOST_DEVICE DropoutStream stream(int64_t batch, int64_t head) const {
    const uint64_t key = static_cast<uint64_t>(per_row ? seed[2 * batch] : seed[0]);
    const uint64_t row = static_cast<uint64_t>(per_row ? seed[2 * batch + 1] : batch);
    return {uint32_t(key), uint32_t(key >> 32), uint32_t(head), uint32_t(row), threshold};
  }
};

}  // namespace attention_ops
