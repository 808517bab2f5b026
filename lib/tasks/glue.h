#pragma once

#include "tasks/task.h"

namespace mergex::tasks {

// The General Language Understanding Evaluation benchmark, as its archive lays the files out: a folder per task in
// `data_dir` with train.tsv, dev.tsv and test.tsv (MNLI: dev_matched.tsv, dev_mismatched.tsv, test_matched.tsv),
// plain or gzip. Files under other names go into `files`; the columns are found by their official names or by those
// of the Hugging Face export.
extern const TaskEntry kGlueCola, kGlueSst2, kGlueMrpc, kGlueStsb, kGlueQqp, kGlueMnli, kGlueQnli, kGlueRte, kGlueWnli;

}  // namespace mergex::tasks
