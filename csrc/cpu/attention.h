// Attention on the CPU, whose kernels also turn rows.
#pragma once
#include "cpu/rope.h"

namespace attention_ops {

// Whether rows are so few that they are decoded.
bool decodes(const Attention& a);

// Keys come as they are multiplied; queries are turned on the way, but not in decoding.
Pair forward_of(const Attention& a, const Rotation& of_queries = {});

// Queries and keys come as they are multiplied; their gradients are turned on the way.
Six backward_of(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed,
                const Rotation& of_queries = {}, const Rotation& of_keys = {});

}  // namespace attention_ops
