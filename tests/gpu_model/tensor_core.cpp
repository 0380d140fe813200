// ldmatrix and mma.sync.m16n8k16, with the operand layouts of the PTX manual.
#include <cstring>

#include "state.h"

namespace gpu_model {

void load_matrices_of_warp(uint32_t (&out)[32][4], const uint32_t (&addresses)[32], bool transposed, Line line) {
  uint16_t tile[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Lane& owner = current->lane(current->now->warp(), lane);
    std::memset(tile[lane / 8][lane % 8], 0xff, 16);
    if (!fits_shared(addresses[lane], 16, owner, line, "row of a matrix")) continue;
    note_read(addresses[lane], 16, owner, line);
    std::memcpy(tile[lane / 8][lane % 8], &current->memory[addresses[lane]], 16);
  }
  count_passes(addresses, ~0u, 16);
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < 4; ++n) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = transposed ? tile[n][j][i] : tile[n][i][j];
      const uint32_t high = transposed ? tile[n][j + 1][i] : tile[n][i][j + 1];
      out[lane][n] = low | high << 16;
    }
}

void WarpProduct::multiply_add(float (*widen)(uint16_t)) {
  ++counters().multiplications;
  float left[16][16], right[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 8; ++i)
      left[group + (i & 2 ? 8 : 0)][pair + (i & 1) + (i >= 4 ? 8 : 0)] =
          widen(uint16_t(a[lane][i / 2] >> (i % 2 * 16)));
    for (int i = 0; i < 4; ++i)
      right[pair + (i & 1) + (i >= 2 ? 8 : 0)][group] = widen(uint16_t(b[lane][i / 2] >> (i % 2 * 16)));
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + (i & 1);
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
      d[lane][i] += sum;
    }
}

void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed, Line line) {
  struct Slot {
    uint32_t address;
    uint32_t* out;
  } slot{address, r};
  meet("load_matrices", &slot, line, [transposed, line](Meeting& m) {
    uint32_t addresses[32], out[32][4];
    for (int lane = 0; lane < 32; ++lane) addresses[lane] = static_cast<Slot*>(m.slot[lane])->address;
    load_matrices_of_warp(out, addresses, transposed, line);
    for (int lane = 0; lane < 32; ++lane) std::memcpy(static_cast<Slot*>(m.slot[lane])->out, out[lane], sizeof out[0]);
  });
}

void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*widen)(uint16_t), Line line) {
  struct Slot {
    float* d;
    const uint32_t *a, *b;
  } slot{d, a, b};
  meet("multiply_add", &slot, line, [widen](Meeting& m) {
    WarpProduct product;
    for (int lane = 0; lane < 32; ++lane) {
      const Slot& s = *static_cast<Slot*>(m.slot[lane]);
      std::memcpy(product.a[lane], s.a, sizeof product.a[0]), std::memcpy(product.b[lane], s.b, sizeof product.b[0]);
      std::memcpy(product.d[lane], s.d, sizeof product.d[0]);
    }
    product.multiply_add(widen);
    for (int lane = 0; lane < 32; ++lane)
      std::memcpy(static_cast<Slot*>(m.slot[lane])->d, product.d[lane], sizeof product.d[0]);
  });
}

}  // namespace gpu_model
