#pragma once

namespace mergex::routing {

/// Where the paper and the authors' public code differ, whose defaults a recipe starts from. Each difference is an
/// option of its own besides (docs/camex.md, "Paper and release").
enum class Profile { kPaper, kRelease };

}  // namespace mergex::routing
