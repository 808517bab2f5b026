#pragma once

#include <cstdint>

#include "merging/plan.h"
#include "merging/section.h"

namespace mergex::merging {

/// Settles a merge from the headers of its models: which tensor is made of what, with which parameters, in which type,
/// and what config.json says then. Reads no tensor but to compare copies of one (tied heads) and buffers.
/// @param seed  of the random methods
/// @throws UserError that lists every missing or mis-shaped tensor at once
MergePlan plan_merge(const MergeSection& section, std::uint64_t seed);

}  // namespace mergex::merging
