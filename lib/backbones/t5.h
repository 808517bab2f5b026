#pragma once

#include "backbones/backbone.h"
#include "backbones/t5_config.h"

namespace mergex::backbones {

extern const Family kT5;

}  // namespace mergex::backbones
