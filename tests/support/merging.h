#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "merging/method.h"

namespace mergex::test {

/// Where a merge is cut: elements per tile and per unit, rounded to whole rows where the method needs them.
struct Tiling {
  std::int64_t tile = 16384, unit = 1 << 20;
};

using Named = std::map<std::string, double, std::less<>>;

/// A tensor's merge over arrays in memory.
template <class T>
struct InMemory {
  merging::TensorContext context = {};
  std::vector<T> base = {};  ///< empty: none
  std::vector<std::vector<T>> inputs = {};
};

/// A context with the method's defaults; what has none must be given. `per_input` has one entry, for all, or one each.
inline merging::TensorContext context_for(const merging::Method& method, std::vector<std::int64_t> shape,
                                          std::size_t num_inputs, const std::vector<Named>& per_input = {},
                                          const Named& shared = {},
                                          merging::Dialect dialect = merging::Dialect::kMergekit) {
  using merging::Parameter;
  merging::TensorContext context{.name = "tensor", .shape = std::move(shape), .dialect = dialect, .seed = 7};
  context.has_base = method.base == merging::Method::Base::kRequired;
  const auto set = [](const Parameter& p, const Named& given, merging::Values& values) {
    const auto found = given.find(p.name);
    values.set(p.name, found != given.end() ? found->second : p.fallback.value());
  };
  for (std::size_t i = 0; i < num_inputs; ++i) {
    auto& input = context.inputs.emplace_back();
    input.identity = "model-" + std::to_string(i);
    const auto given = per_input.empty() ? Named{} : per_input.size() == 1 ? per_input[0] : per_input.at(i);
    for (const auto& p : method.parameters) {
      if (p.scope == Parameter::Scope::kInput) set(p, given, input.parameters);
    }
  }
  for (const auto& p : method.parameters) {
    if (p.scope == Parameter::Scope::kShared) set(p, shared, context.shared);
  }
  return context;
}

template <class T>
std::unique_ptr<merging::TensorMerge<T>> make_merge(const merging::Method& method,
                                                    const merging::TensorContext& context, merging::ModelState* state) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return method.make_float(context, state);
  } else {
    return method.make_double(context, state);
  }
}

/// Calls body(tile) for every tile in order; `unit_order` reverses the units.
template <class T, class Body>
void over_tiles(const InMemory<T>& tensor, bool whole_rows, Tiling tiling, Body body) {
  const auto& context = tensor.context;
  const auto whole = [&](std::int64_t count) {
    const auto row = whole_rows ? std::max<std::int64_t>(1, context.row_length()) : 1;
    return std::max(row, count / row * row);
  };
  const auto tile_length = whole(tiling.tile), unit_length = whole(tiling.unit), total = context.num_elements();
  const auto num_units = (total + unit_length - 1) / unit_length;
  std::vector<const T*> inputs(tensor.inputs.size());
  for (std::int64_t unit = num_units; unit-- > 0;) {  // backwards: the order of units must not matter
    const auto unit_end = std::min(total, (unit + 1) * unit_length);
    for (std::int64_t begin = unit * unit_length; begin < unit_end; begin += tile_length) {
      for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = tensor.inputs[i].data() + begin;
      merging::Tile<T> tile{.begin = begin,
                            .count = std::min(tile_length, unit_end - begin),
                            .unit = unit,
                            .opens_unit = begin == unit * unit_length,
                            .base = tensor.base.empty() ? nullptr : tensor.base.data() + begin,
                            .inputs = inputs};
      body(tile, num_units);
    }
  }
}

/// Merges the tensors of a model from one thread, pass by pass.
template <class T>
std::vector<std::vector<T>> merge_model(const merging::Method& method, const std::vector<InMemory<T>>& tensors,
                                        Tiling tiling = {}, std::vector<io::Json>* reports = nullptr) {
  std::shared_ptr<merging::ModelState> state;
  if (method.model_state != nullptr && !tensors.empty()) state = method.model_state(tensors[0].context);
  std::vector<std::unique_ptr<merging::TensorMerge<T>>> merges;
  int passes = 0;
  for (const auto& tensor : tensors) {
    merges.push_back(make_merge<T>(method, tensor.context, state.get()));
    passes = std::max(passes, merges.back()->needs().passes);
  }
  const auto run = [&](std::size_t index, auto&& body) {
    const auto& merge = *merges[index];
    const auto needs = merge.needs();
    const auto num_units = [&] {
      std::int64_t n = 0;
      over_tiles(tensors[index], needs.whole_rows, tiling, [&](const auto&, std::int64_t units) { n = units; });
      return static_cast<std::size_t>(n);
    }();
    std::vector<double> unit_sums(num_units * needs.sums);
    std::vector<std::uint32_t> counts(needs.counts);
    std::vector<std::int64_t> unit_state(needs.state);
    std::vector<std::vector<std::uint64_t>> unit_lists(num_units * needs.lists);
    over_tiles(tensors[index], needs.whole_rows, tiling, [&](const merging::Tile<T>& tile, std::int64_t) {
      if (tile.opens_unit) std::ranges::fill(unit_state, 0);
      std::vector<T> scratch(needs.scratch * static_cast<std::size_t>(tile.count));
      body(tile, merging::Workspace<T>{
                     .sums = std::span(unit_sums).subspan(static_cast<std::size_t>(tile.unit) * needs.sums, needs.sums),
                     .counts = counts,
                     .state = unit_state,
                     .scratch = scratch,
                     .lists = std::span(unit_lists).subspan(static_cast<std::size_t>(tile.unit) * needs.lists, needs.lists)});
    });
    std::vector<double> sums(needs.sums);
    for (std::size_t i = 0; i < unit_sums.size(); ++i) sums[i % needs.sums] += unit_sums[i];
    std::vector<std::uint64_t> wide_counts(counts.begin(), counts.end());
    return std::tuple{std::move(sums), std::move(unit_sums), std::move(wide_counts), std::move(unit_lists)};
  };
  for (int pass = 0; pass < passes; ++pass) {
    for (std::size_t i = 0; i < merges.size(); ++i) {
      if (pass >= merges[i]->needs().passes || !merges[i]->wants(pass)) continue;
      const auto [sums, unit_sums, counts, unit_lists] =
          run(i, [&](const auto& tile, const auto& workspace) { merges[i]->gather(pass, tile, workspace); });
      merges[i]->finish(pass, {.sums = sums, .unit_sums = unit_sums, .counts = counts, .unit_lists = unit_lists});
    }
    if (state) state->finish(pass);
  }
  std::vector<std::vector<T>> results;
  for (std::size_t i = 0; i < merges.size(); ++i) {
    std::vector<T> out(static_cast<std::size_t>(tensors[i].context.num_elements()));
    run(i,
        [&](const auto& tile, const auto& workspace) { merges[i]->merge(tile, workspace, out.data() + tile.begin); });
    results.push_back(std::move(out));
    if (reports != nullptr) merges[i]->report(reports->emplace_back(io::Json::object()));
  }
  return results;
}

template <class T>
std::vector<T> merge_tensor(const merging::Method& method, const InMemory<T>& tensor, Tiling tiling = {},
                            io::Json* report = nullptr) {
  std::vector<io::Json> reports;
  auto results = merge_model<T>(method, {tensor}, tiling, &reports);
  if (report != nullptr) *report = reports[0];
  return results[0];
}

}  // namespace mergex::test
