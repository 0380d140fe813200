// Attention on the CPU, whose kernels also turn rows.
#pragma once
#include "cpu/rope.h"

namespace attention_ops {

// Whether rows are so few that they are decoded, where kernels turn none.
bool decodes(const Attention& a);

// The kernel turns the queries; keys come as they are multiplied.
Pair forward_of(const Attention& a, const Rotation& of_queries = {});

// Query and key come as they are multiplied; the kernel turns their gradients.
Six backward_of(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed,
                const Rotation& back = {});

}  // namespace attention_ops
