#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report.h"

namespace mergex::engine {

/// Training loss, and the metric that selects the best checkpoint, over steps; an SVG document. Rows with the same
/// label are seeds: their mean is a line, and a band reaches from the lowest to the highest where there are few enough
/// rows to tell bands apart. A single row shows the loss of the first validation split beside that of training.
/// What is drawn comes from metrics.jsonl in each row's folder, so that it depends on no times.
std::string curves_plot(const std::string& title, const std::vector<ReportRow>& rows);

/// curves.svg of a run or a sweep.
void write_curves(const std::filesystem::path& folder, const std::string& title, const std::vector<ReportRow>& rows);

}  // namespace mergex::engine
