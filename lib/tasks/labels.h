#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_object.h"

namespace mergex::tasks {

/// What a label cell says. Either a value, or a problem, or neither: the example has no label.
struct Label {
  std::optional<double> value = {};
  std::string problem = {};
};

/// The class of a label cell: one of the names, or the class's number where no name is itself a number. Empty and
/// "-1" (unless they are names) and `no_label` mean that there is none.
Label class_label(std::string_view cell, std::span<const std::string> names, std::string_view no_label = {});

/// The score of a label cell. Empty and `no_label` mean that there is none.
Label score_label(std::string_view cell, const io::Range& range = {}, std::optional<double> no_label = {});

/// The distinct labels, ordered as numbers where all are whole numbers and as bytes otherwise.
std::vector<std::string> distinct_labels(std::vector<std::string> cells);

/// Matches the outputs of a checkpoint's head to a task's labels by name; upper case, "_", "-" and " " do not
/// count. Outputs that have no names ("LABEL_0") are taken to be in the task's order.
/// @param origin  names the checkpoint in the message
/// @return        for every label of the task the checkpoint's output that stands for it
/// @throws UserError when the names are not the same set: scores would mean nothing
std::vector<std::size_t> match_labels(std::span<const std::string> task_labels,
                                      std::span<const std::string> checkpoint_labels, std::string_view origin);

}  // namespace mergex::tasks
