#pragma once

#include "merging/plan.h"

namespace mergex::merging {

/// Fills in what lies beside the weights of the result: `config` as config.json, and everything of the donor's folder that
/// is neither weights, nor the state of a training, nor a report of an earlier merge: tokenizer, generation config, pooling
/// configs, custom code. Files that the plan writes already are not copied.
/// @param has_tokenizer  the plan brings its own tokenizer, so that no file of the donor's is copied
void plan_sidecar_files(MergePlan& plan, const io::Json& config, bool has_tokenizer);

}  // namespace mergex::merging
