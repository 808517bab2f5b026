#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tasks/task.h"

namespace mergex::tasks {

// GLUE as T5 was trained on it: the task's name and the texts, each behind its key, in; the name of a class, or a
// score in steps of 0.2, out. Source: Raffel et al. 2020, section 2.4 and appendix D (arXiv:1910.10683).

/// "mnli hypothesis: A premise: B": the keys in the order of their bytes.
/// @param keys  of the text and, where there is one, of the second text
std::string text_to_text_input(const Example& example, std::string_view task, std::span<const std::string> keys);

/// The answer for a class, or for a score: rounded to a multiple of 0.2 in float32, halves to the even multiple.
/// @param labels  names of the classes; empty: scores
std::string target_text(double label, std::span<const std::string> labels);

/// What an answer stands for: a class, or a score. Nothing where it names no class, or is no finite number; a class's
/// name must be all of the answer.
std::optional<double> parse_target(std::string_view answer, std::span<const std::string> labels);

/// All answers that a training example can have.
std::vector<std::string> possible_targets(std::span<const std::string> labels);

/// Puts the input into `text`, and the answer into `target` where the example has a label.
void make_text_to_text(Example& example, std::string_view task, std::span<const std::string> keys,
                       std::span<const std::string> labels);

}  // namespace mergex::tasks
