#include "merging/execute.h"
#include <cstring>
#include "core/error.h"
#include "io/atomic_file.h"
#include "merging/span_kernels.h"
namespace mergex::merging {
namespace fs = std::filesystem;
void check_output(const fs::path& out, bool, bool overwrite) {
  if (fs::exists(out) && !fs::is_empty(out) && !overwrite) fail("{}: is not empty; choose another --out, or --overwrite", out.string());
}
namespace {
template <class T> std::string run(const PlannedTensor& t) {
  auto m = [&] { if constexpr (sizeof(T) == 4) return t.method->make_float(t.context, nullptr); else return t.method->make_double(t.context, nullptr); }();
  const auto needs = m->needs();
  const std::int64_t n = t.context.num_elements();
  std::int64_t tile = 16384;
  if (needs.whole_rows) { const auto r = std::max<std::int64_t>(1, t.context.row_length()); tile = std::max<std::int64_t>(r, tile / r * r); }
  std::vector<std::vector<T>> in(t.inputs.size(), std::vector<T>(static_cast<std::size_t>(std::min(n, tile))));
  std::vector<T> base(static_cast<std::size_t>(std::min(n, tile))), out(base.size()), scratch(needs.scratch * base.size());
  std::string bytes(t.num_bytes(), '\0');
  std::vector<double> sums(needs.sums); std::vector<std::uint32_t> counts(needs.counts); std::vector<std::int64_t> state(needs.state);
  auto each = [&](auto f) {
    for (std::int64_t b = 0; b < n; b += tile) {
      Tile<T> x{.begin = b, .count = std::min(tile, n - b), .unit = 0, .opens_unit = b == 0, .base = nullptr, .inputs = {}};
      std::vector<const T*> p;
      for (std::size_t i = 0; i < in.size(); ++i) { t.inputs[i].source->read(b, x.count, in[i].data()); p.push_back(in[i].data()); }
      if (t.base) { t.base->source->read(b, x.count, base.data()); x.base = base.data(); }
      x.inputs = p;
      f(x, Workspace<T>{sums, counts, state, std::span(scratch).first(needs.scratch * static_cast<std::size_t>(x.count))});
    }
  };
  for (int pass = 0; pass < needs.passes; ++pass) {
    if (!m->wants(pass)) continue;
    std::ranges::fill(sums, 0.0); std::ranges::fill(counts, 0u); std::ranges::fill(state, 0);
    each([&](const auto& x, const auto& w) { m->gather(pass, x, w); });
    std::vector<std::uint64_t> c(counts.begin(), counts.end());
    m->finish(pass, {sums, sums, c});
  }
  std::ranges::fill(state, 0);
  each([&](const auto& x, const auto& w) {
    m->merge(x, w, out.data());
    narrow_values(t.dtype, x.count, out.data(), bytes.data() + x.begin * static_cast<std::int64_t>(io::dtype_size(t.dtype)));
  });
  return bytes;
}
}
Executed execute(const MergePlan& plan, const ExecuteOptions& options) {
  check_output(options.out, options.resume, options.overwrite);
  fs::create_directories(options.out);
  std::vector<std::string> storage; std::vector<io::TensorView> views; storage.reserve(plan.tensors.size());
  for (const auto& t : plan.tensors) {
    if (t.method == nullptr) { const auto& v = *t.copied->source->stored(); storage.emplace_back(reinterpret_cast<const char*>(v.bytes.data()), v.bytes.size()); }
    else storage.push_back(t.wide ? run<double>(t) : run<float>(t));
    views.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape, .bytes = std::as_bytes(std::span(storage.back()))});
  }
  io::write_safetensors(options.out / "model.safetensors", views);
  for (const auto& [name, c] : plan.written_files) io::write_file(options.out / name, c);
  for (const auto& f : plan.copied_files) { fs::create_directories((options.out / f).parent_path()); fs::copy_file(plan.donor / f, options.out / f, fs::copy_options::overwrite_existing); }
  return {};
}
}
