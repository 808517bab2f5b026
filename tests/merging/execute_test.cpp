#include "merging/execute.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <system_error>

#include "core/error.h"
#include "io/atomic_file.h"
#include "merging/driver.h"
#include "merging/model_card.h"
#include "merging/shards.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/small_merges.h"

namespace mergex::merging {
namespace {
namespace fs = std::filesystem;
using Catch::Contains;
using io::DType;
using io::Json;
using test::MadeTensor;
using test::SmallMerge;

bool is_missing(const fs::path& out) { return !fs::exists(out) && !fs::exists(partial_folder(out)); }

/// "RssAnon" and the like of this process.
std::uint64_t status_bytes(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMeasuresMemory = false;  // a sanitizer's own memory is many times that of the program
#else
constexpr bool kMeasuresMemory = true;
#endif

/// A checkpoint of zeros that takes no room on the disk.
void make_sparse_checkpoint(const fs::path& folder, const std::vector<std::int64_t>& sizes) {
  fs::create_directories(folder);
  io::write_file(folder / "config.json", "{}\n");
  std::vector<std::string> names;
  for (std::size_t i = 0; i < sizes.size(); ++i) names.push_back(fmt::format("tensor.{}", i));
  std::vector<io::TensorHeader> headers;
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    headers.push_back({.name = names[i], .dtype = DType::kBF16, .shape = std::span(sizes).subspan(i, 1)});
    size += 2 * static_cast<std::uint64_t>(sizes[i]);
  }
  const auto header = io::safetensors_header(headers, {});
  io::write_file(folder / "model.safetensors", header);
  fs::resize_file(folder / "model.safetensors", header.size() + size);
}

MergePlan plan_of_sparse(const fs::path& folder, const Method& method) {
  MergePlan plan;
  for (const auto* name : {"a", "b", "c"})
    plan.models.push_back({.name = name, .folder = std::make_shared<const io::CheckpointFolder>(folder / name)});
  for (const auto* view : plan.models[0].folder->tensors()) {
    PlannedTensor tensor{.name = view->name, .dtype = view->dtype, .shape = view->shape, .method = &method};
    tensor.context = {.name = view->name, .shape = view->shape};
    for (std::size_t model = 0; model < 3; ++model) {
      plan.sources.push_back(std::make_unique<StoredTensor>(*plan.models[model].folder->find(view->name)));
      tensor.inputs.push_back({.model = model, .tensor = view->name, .source = plan.sources.back().get()});
      tensor.context.inputs.push_back({.identity = std::to_string(model)});
    }
    plan.tensors.push_back(std::move(tensor));
  }
  return plan;
}

/// Most anonymous memory that a merge took beyond what was there before.
std::uint64_t peak_of(const MergePlan& plan, ExecuteOptions options) {
  const auto before = status_bytes("RssAnon");
  std::uint64_t peak = 0;
  options.progress = [&](std::uint64_t, std::uint64_t, std::string_view) {
    peak = std::max(peak, status_bytes("RssAnon"));
  };
  execute(plan, options);
  REQUIRE(peak > 0);
  return peak - std::min(peak, before);
}

}  // namespace

TEST_CASE("a merge computes what its methods say, whatever the number of threads, shards and memory",
          "[merging][law]") {
  const test::TemporaryFolder folder;
  std::map<std::string, std::string> first;
  for (const std::size_t input_shards : {1u, 3u}) {
    const SmallMerge merge{.folder = folder / fmt::format("in{}", input_shards), .input_shards = input_shards};
    merge.make_inputs();
    const auto plan = merge.plan();
    std::map<std::string, std::string> of_these_inputs;
    for (const std::size_t threads : {1u, 2u, 3u, 8u}) {
      INFO(input_shards << " shards, " << threads << " threads");
      const auto out = folder / fmt::format("out{}-{}", input_shards, threads);
      execute(plan, {.out = out, .memory_bytes = (threads == 3 ? 3u : 512u) << 20, .threads = threads});
      auto content = test::comparable_content(out);
      if (of_these_inputs.empty()) {
        of_these_inputs = content;
        const io::CheckpointFolder merged(out);
        REQUIRE(merged.tensors().size() == plan.tensors.size());
        for (const auto& tensor : plan.tensors) {
          INFO(tensor.name);
          const auto* view = merged.find(tensor.name);
          REQUIRE(view != nullptr);
          CHECK(view->dtype == tensor.dtype);
          CHECK(view->shape == tensor.shape);
          const auto ours = test::values_of(*view), wanted = test::expected_values(plan, tensor);
          REQUIRE(ours.size() == wanted.size());
          // Half a unit of the last place of the type, of values up to 8; a few roundings of float before it.
          const double ulp = tensor.dtype == DType::kBF16  ? 0x1p-8
                             : tensor.dtype == DType::kF16 ? 0x1p-11
                             : tensor.dtype == DType::kF64 ? 0x1p-52
                                                           : 0x1p-22;
          double error = 0.0;
          for (std::size_t i = 0; i < ours.size(); ++i)
            error = std::max(error, std::abs(ours[i] - wanted[i]) / std::max(1.0, std::abs(wanted[i])));
          CHECK(error <= (tensor.method == nullptr ? 0.0 : 1.01 * ulp));
        }
      }
      CHECK(content == of_these_inputs);  // report, manifest and model card too
      // What the inputs' files are called stands in the manifest; nothing else may depend on it.
      content.erase("manifest.json");
      if (first.empty()) first = content;
      CHECK(content == first);
    }
  }
}

TEST_CASE("shards are filled in order, wide types first, and hold what the plan says", "[merging][law]") {
  std::vector<PlannedTensor> tensors;
  const auto add = [&](const char* name, DType dtype, std::int64_t count) {
    tensors.push_back({.name = name, .dtype = dtype, .shape = {count}});
  };
  add("a", DType::kBF16, 3);  // 6 bytes
  add("b", DType::kF32, 2);   // 8
  add("c", DType::kU8, 1);    // 1
  add("huge", DType::kU8, 50);
  add("d", DType::kF64, 1);  // 8
  add("e", DType::kF16, 4);  // 8

  const auto layout = plan_shards(tensors, 16);
  REQUIRE(layout.shards.size() == 3);
  CHECK(layout.shards[0].tensors == std::vector<std::size_t>{1, 0, 2});
  CHECK(layout.shards[1].tensors == std::vector<std::size_t>{3});
  CHECK(layout.shards[2].tensors == std::vector<std::size_t>{4, 5});
  CHECK(layout.shards[0].file == "model-00001-of-00003.safetensors");
  CHECK(layout.data_bytes == 81);
  const auto index = Json::parse(layout.index(tensors));
  CHECK(index["metadata"]["total_size"] == 81);
  CHECK(index["weight_map"]["huge"] == "model-00002-of-00003.safetensors");

  const auto whole = plan_shards(tensors, 1000);
  REQUIRE(whole.shards.size() == 1);
  CHECK(whole.shards[0].file == "model.safetensors");
  CHECK(whole.index(tensors).empty());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    CHECK(whole.places[i].offset % io::dtype_size(tensors[i].dtype) == 0);
}

TEST_CASE("sharding changes no tensor, and the sizes add up", "[merging][law]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path()};
  merge.make_inputs();
  const auto plan = merge.plan();
  execute(plan, {.out = folder / "one", .threads = 2});
  const io::CheckpointFolder one(folder / "one");
  for (const std::uint64_t shard_bytes : {1ull, 30'000ull, 1'000'000ull}) {
    const auto out = folder / fmt::format("shards{}", shard_bytes);
    const auto done = execute(plan, {.out = out, .shard_bytes = shard_bytes, .threads = 2});
    const io::CheckpointFolder sharded(out);
    REQUIRE(sharded.tensors().size() == plan.tensors.size());
    std::uint64_t total = 0;
    for (const auto& tensor : plan.tensors) {
      INFO(tensor.name);
      CHECK(std::ranges::equal(sharded.find(tensor.name)->bytes, one.find(tensor.name)->bytes));
      total += tensor.num_bytes();
    }
    CHECK(done.bytes == total);
    CHECK(io::read_json(out / "model.safetensors.index.json")["metadata"]["total_size"] == total);
  }
}

TEST_CASE("units hold whole tiles and whole rows, and are few where sums are large", "[merging][law]") {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
           {}, {1}, {0, 3}, {3, 0}, {1'000'003}, {4097, 5}, {3, 20'000}, {2, 300'000}, {70'001, 64}}) {
    for (const bool whole_rows : {false, true}) {
      for (const std::size_t num_sums : {0u, 1u, 100'000u}) {
        const TensorContext context{.name = "t", .shape = shape};
        const auto division = divide(context, whole_rows, num_sums);
        INFO(io::shape_text(shape) << whole_rows << num_sums);
        CHECK(division.unit % division.tile == 0);
        if (whole_rows) CHECK(division.tile % std::max<std::int64_t>(1, context.row_length()) == 0);
        CHECK(division.num_units * division.unit >= context.num_elements());
        CHECK((division.num_units - 1) * division.unit < std::max<std::int64_t>(1, context.num_elements()));
        if (num_sums > 10'000) CHECK(division.num_units <= 64);
      }
    }
  }
}

TEST_CASE("results that are not finite are counted", "[merging]") {
  const test::TemporaryFolder folder;
  for (const auto* name : {"a", "b", "c"}) {
    test::make_checkpoint(folder / name, Json::object(),
                          {{"tensor.0", {1000}, DType::kF32, 5, 1e5}, {"tensor.1", {10}, DType::kF32, 5}});
  }
  auto plan = plan_of_sparse(folder.path(), test::kMean);
  for (auto& tensor : plan.tensors) tensor.dtype = DType::kF16;
  execute(plan, {.out = folder / "out"});
  const auto large = std::ranges::count_if(test::made_values({"tensor.0", {1000}, DType::kF32, 5, 1e5}),
                                           [](float x) { return std::abs(x) >= 65'520.0f; });
  REQUIRE(large > 10);
  const auto report = io::read_json(folder / "out/merge_report.json");
  CHECK(report["tensors"][0]["not_finite"] == large);
  CHECK(report["tensors"][1]["not_finite"] == 0);
  CHECK(report["totals"]["not_finite"] == large);
}

TEST_CASE("the report holds norms, cosines and conflicts of signs", "[merging]") {
  const test::TemporaryFolder folder;
  const auto write = [&](const char* name, std::vector<float> values) {
    fs::create_directories(folder / name);
    io::write_file(folder / name / "config.json", "{}\n");
    const io::TensorView view{.name = "w",
                              .dtype = DType::kF32,
                              .shape = {static_cast<std::int64_t>(values.size())},
                              .bytes = std::as_bytes(std::span(values))};
    io::write_safetensors(folder / name / "model.safetensors", std::array{view});
  };
  write("base", {1, 1, 1, 1});
  write("a", {4, 1, 5, 1});   // task vector (3, 0, 4, 0): norm 5
  write("b", {0, 3, 0, -1});  // (-1, 2, -1, -2): norm sqrt(10); conflicts at 0 and 2
  MergePlan plan;
  for (const auto* name : {"base", "a", "b"})
    plan.models.push_back({.name = name, .folder = std::make_shared<const io::CheckpointFolder>(folder / name)});
  PlannedTensor tensor{.name = "w", .dtype = DType::kF32, .shape = {4}, .method = &test::kMean, .note = "as it is"};
  tensor.context = {.name = "w", .shape = {4}, .has_base = true};
  for (std::size_t model = 0; model < 3; ++model) {
    plan.sources.push_back(std::make_unique<StoredTensor>(*plan.models[model].folder->find("w")));
    const PlannedTensor::Origin origin{.model = model, .tensor = "w", .source = plan.sources.back().get()};
    if (model == 0) {
      tensor.base = origin;
    } else {
      tensor.inputs.push_back(origin);
      tensor.context.inputs.push_back({.identity = std::to_string(model)});
    }
  }
  plan.tensors.push_back(std::move(tensor));
  execute(plan, {.out = folder / "out"});
  const auto report = io::read_json(folder / "out/merge_report.json");
  const auto& entry = report["tensors"][0];
  CHECK(entry["method"] == "mean");
  CHECK(entry["inputs"][0]["task_vector_norm"].get<double>() == Approx(5.0).epsilon(1e-6));
  CHECK(entry["inputs"][1]["task_vector_norm"].get<double>() == Approx(std::sqrt(10.0)).epsilon(1e-6));
  CHECK(entry["sign_conflicts"] == 0.5);
  // The result is (5, 5, 6, 1) / 3.
  CHECK(entry["base"]["cosine"].get<double>() == Approx(17.0 / (2.0 * std::sqrt(87.0))).epsilon(1e-6));
  CHECK(entry["inputs"][0]["cosine"].get<double>() ==
        Approx((20.0 + 5 + 30 + 1) / (std::sqrt(43.0) * std::sqrt(87.0))).epsilon(1e-6));
  CHECK(entry["inputs"][1]["cosine"].get<double>() ==
        Approx((15.0 - 1) / (std::sqrt(10.0) * std::sqrt(87.0))).epsilon(1e-6));
  CHECK(entry["findings"]["is_mean"] == true);
  CHECK(entry["note"] == "as it is");
  CHECK(report["totals"]["inputs"][0]["task_vector_norm"].get<double>() == Approx(5.0).epsilon(1e-6));
}

TEST_CASE("the model card names what the hub's cache says models are called, and nothing else", "[merging]") {
  const test::TemporaryFolder folder;
  const auto cached = folder / "models--some-lab--model-7b.v1" / "snapshots" / "0a1b";
  for (const auto& path : {cached, folder / "plain", folder / "models--broken"}) {
    test::make_checkpoint(path, Json::object(), {{"w", {3}, DType::kF32}});
  }
  MergePlan plan;
  for (const auto& path : {cached, folder / "plain", folder / "models--broken"}) {
    plan.models.push_back(
        {.name = path.filename().string(), .folder = std::make_shared<const io::CheckpointFolder>(path)});
  }
  plan.resolved = Json{{"name", "mixed"}};
  const auto card = model_card(plan);
  CHECK_THAT(card,
             Catch::StartsWith("---\ntags:\n- merge\n- mergex\nbase_model:\n- some-lab/model-7b.v1\n---\n\n# mixed\n"));
  plan.models.erase(plan.models.begin());
  CHECK_THAT(model_card(plan), Catch::StartsWith("---\ntags:\n- merge\n- mergex\n---\n\n# mixed\n"));
}

TEMPLATE_TEST_CASE("sums of the report are what they are defined as", "[merging][law]", float, double) {
  const double tolerance = sizeof(TestType) == sizeof(float) ? 1e-5 : 1e-12;
  for (const std::int64_t count : {0, 1, 15, 17, 1023, 1024, 5003}) {
    for (const bool has_base : {false, true}) {
      INFO(count << " elements" << (has_base ? ", base" : ""));
      std::vector<std::vector<TestType>> x;
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        const auto made = test::made_values({"x", {count}, DType::kF32, seed});
        x.emplace_back(made.begin(), made.end());
      }
      const std::vector<const TestType*> inputs{x[0].data(), x[1].data()};
      Comparison ours(2);
      ours.add<TestType>(count, has_base ? x[3].data() : nullptr, inputs, x[2].data());
      double distance[2] = {}, dot[2] = {}, square[2] = {}, result_square = 0.0, base_dot = 0.0;
      std::int64_t num_conflicts = 0;
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        const double result = x[2][i], base = x[3][i], reference = has_base ? base : result;
        for (std::size_t k = 0; k < 2; ++k) {
          const double value = x[k][i];
          distance[k] += (value - reference) * (value - reference);
          dot[k] += value * result;
          square[k] += value * value;
        }
        result_square += result * result;
        base_dot += has_base ? base * result : 0.0;
        num_conflicts +=
            has_base && (x[0][i] > x[3][i]) != (x[1][i] > x[3][i]) && x[0][i] != x[3][i] && x[1][i] != x[3][i];
      }
      const double margin =
          tolerance * std::max(1.0, static_cast<double>(count));  // cosines of random vectors are near 0
      for (std::size_t k = 0; k < 2; ++k) {
        CHECK(ours.inputs[k].distance == Approx(distance[k]).epsilon(tolerance));
        CHECK(ours.inputs[k].dot == Approx(dot[k]).margin(margin));
        CHECK(ours.inputs[k].square == Approx(square[k]).epsilon(tolerance));
      }
      CHECK(ours.result_square == Approx(result_square).epsilon(tolerance));
      CHECK(ours.base.dot == Approx(base_dot).margin(margin));
      CHECK(ours.num_conflicts == num_conflicts);
    }
  }
}

TEST_CASE("sums of the report do not overflow where values are large", "[merging]") {
  Comparison comparison(1);
  const std::vector<float> x{3e30f, 4e30f}, base{0.0f, 0.0f};
  comparison.add<float>(2, base.data(), std::array{x.data()}, x.data());
  CHECK(std::sqrt(comparison.inputs[0].distance) == Approx(5e30).epsilon(1e-6));
  CHECK(std::sqrt(comparison.result_square) == Approx(5e30).epsilon(1e-6));
}

TEST_CASE("where a result may be written", "[merging]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .long_tensor = 100, .num_small = 2};
  merge.make_inputs();
  const auto plan = merge.plan();
  const auto out = folder / "out";

  SECTION("an empty folder is taken") {
    fs::create_directories(out);
    execute(plan, {.out = out});
    CHECK(fs::exists(out / "model.safetensors"));
  }
  SECTION("folders on the way are made, a slash at the end does not matter") {
    execute(plan, {.out = (out / "deep/er").string() + "/"});
    CHECK(fs::exists(out / "deep/er/model.safetensors"));
    CHECK(!fs::exists(out / "deep/er.partial"));
    CHECK(fs::exists(out / "deep/er/1_Pooling/config.json"));
  }
  SECTION("a folder with something in it is left alone") {
    test::write_text(out / "notes.txt", "mine");
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out}); }),
               Contains("is not empty") && Contains("--overwrite"));
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out, .overwrite = true}); }), Contains("holds no model"));
    CHECK(io::read_file(out / "notes.txt") == "mine");
    CHECK(!fs::exists(partial_folder(out)));
  }
  SECTION("--overwrite replaces a model whole") {
    test::write_text(out / "config.json", "{}");
    test::write_text(out / "model-00001-of-00009.safetensors", "stale");
    execute(plan, {.out = out, .overwrite = true});
    CHECK(!fs::exists(out / "model-00001-of-00009.safetensors"));
    CHECK(fs::exists(out / "model.safetensors"));
    CHECK(!fs::exists(partial_folder(out)));
  }
  SECTION("inputs are not overwritten") {
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = folder / "a", .overwrite = true}); }),
               Contains("input of this merge"));
    test::write_text(folder / "config.json", "{}");
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = folder.path(), .overwrite = true}); }),
               Contains("input of this merge"));
    CHECK(fs::exists(folder / "a/model.safetensors"));
  }
  SECTION("a file is in the way") {
    test::write_text(out, "a file");
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out}); }), Contains("is a file"));
  }
  SECTION("through a link, the folder that it leads to is replaced") {
    fs::create_directories(folder / "disk");
    fs::create_directory_symlink(folder / "disk", out);
    execute(plan, {.out = out});
    CHECK(fs::is_symlink(out));
    CHECK(fs::exists(folder / "disk/model.safetensors"));
  }
  SECTION("two merges do not write to one folder") {
    const OutputFolder other(out, false);
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out}); }), Contains("another merge is writing"));
    CHECK(fs::exists(partial_folder(out)));
  }
}

TEST_CASE("errors leave no folder", "[merging]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path()};
  merge.make_inputs();
  const auto plan = merge.plan();
  const auto out = folder / "new/out";

  SECTION("too little memory for one tensor") {
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out, .memory_bytes = 1 << 20}); }),
               Contains("--memory allows 1.05 MB"));
  }
  SECTION("a full disk is found before the work") {
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit old{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
    rlimit limit = old;
    limit.rlim_cur = 1 << 20;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    bool has_begun = false;
    CHECK_THROWS_AS(execute(plan, {.out = out, .progress = [&](auto, auto, auto) { has_begun = true; }}),
                    std::system_error);
    ::setrlimit(RLIMIT_FSIZE, &old);
    ::signal(SIGXFSZ, SIG_DFL);
    CHECK(!has_begun);
  }
  SECTION("an input that is cut while it is merged is an error, not a crash") {
    const auto file = folder / "b/model.safetensors";
    fs::resize_file(file, fs::file_size(file) / 2);
    CHECK_THROWS_WITH(execute(plan, {.out = out}),
                      Contains("b/model.safetensors: tensor") && Contains("cannot be read"));
  }
  SECTION("an input that changes while it is merged") {
    const auto change = [&](auto, auto, auto) {
      fs::last_write_time(folder / "b/model.safetensors", fs::file_time_type::clock::now());
    };
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out, .progress = change}); }),
               Contains("b/model.safetensors: was changed"));
  }
  CHECK(is_missing(out));
  CHECK(!fs::exists(folder / "new"));
}

TEST_CASE("anonymous memory does not grow with the tensors", "[merging]") {
  const test::TemporaryFolder folder;
  const std::vector<std::int64_t> sizes{20'000'000, 5'000'000, 5'000'000};
  for (const auto* name : {"a", "b", "c"}) make_sparse_checkpoint(folder / name, sizes);
  const auto plan = plan_of_sparse(folder.path(), test::kCentered);
  constexpr std::uint64_t kMemory = 12 << 20;
  const auto peak = peak_of(plan, {.out = folder / "out", .memory_bytes = kMemory, .threads = 2});
  if (kMeasuresMemory) CHECK(peak <= kMemory + (8u << 20));  // beside buffers: stacks of threads, digests, the report
}

TEST_CASE("three models of 6 GB are merged in little memory", "[merging][slow]") {
  const test::TemporaryFolder folder;
  const std::vector<std::int64_t> sizes{1'000'000'000, 500'000'000, 500'000'000, 500'000'000, 500'000'000};
  for (const auto* name : {"a", "b", "c"}) make_sparse_checkpoint(folder / name, sizes);
  const auto plan = plan_of_sparse(folder.path(), test::kCentered);
  constexpr std::uint64_t kMemory = 256 << 20;
  const auto peak = peak_of(plan, {.out = folder / "out", .memory_bytes = kMemory, .threads = 2});
  fmt::print("3 x 6 GB: {} MB of anonymous memory\n", peak / 1'000'000);
  if (kMeasuresMemory) CHECK(peak <= kMemory + (32u << 20));
}

}  // namespace mergex::merging
