#pragma once

#include "merging/method.h"

namespace mergex::merging {

// One line per method; the order of help is registry.cpp's.
extern const Method kLinear, kUniformSoup;
extern const Method kSlerp, kNuslerp, kMultislerp, kKarcher;
extern const Method kTaskArithmetic, kTies, kDareLinear, kDareTies, kDella, kDellaLinear, kBreadcrumbs,
    kBreadcrumbsTies;
extern const Method kSce, kModelStock, kNearswap, kArceeFusion, kRam, kRamplusTl;
extern const Method kPassthrough, kFisher, kRegmean;

}  // namespace mergex::merging
