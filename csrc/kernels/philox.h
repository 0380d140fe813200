// Philox4x32-10 (Salmon et al. 2011): a random function of a counter, and dropout's use of it.
#pragma once
#include <cstdint>

#include "kernels/host_device.h"

namespace attention_ops {

// W is a number of 32 bits or a vector of them.
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
struct MultiplyWide {
  HOST_DEVICE WideProduct<uint32_t> operator()(uint32_t a, uint32_t b) const {
    const uint64_t product = uint64_t(a) * b;
    return {uint32_t(product >> 32), uint32_t(product)};
  }
};

template <class W, class Multiply>
HOST_DEVICE inline PhiloxWords<W> philox(W c0, W c1, W c2, W c3, uint32_t key0, uint32_t key1, Multiply multiply) {
  for (int round = 0; round < 10; ++round) {
    const WideProduct<W> a = multiply(c0, 0xD2511F53u), b = multiply(c2, 0xCD9E8D57u);
    c0 = b.high ^ c1 ^ key0;
    c1 = b.low;
    c2 = a.high ^ c3 ^ key1;
    c3 = a.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The stream of one batch and head. Counter (j / 8, i, head, batch) gives the 16 bits of eight neighbouring keys.
struct DropoutStream {
  uint32_t key0, key1, head, batch;
  uint32_t threshold;  // keep where bits >= threshold

  HOST_DEVICE Philox eight(uint32_t i, uint32_t group) const {
    return philox(group, i, head, batch, key0, key1, MultiplyWide());
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
