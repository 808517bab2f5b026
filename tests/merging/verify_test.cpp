#include "merging/verify.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "io/atomic_file.h"
#include "merging/diff.h"
#include "merging/digest.h"
#include "merging/execute.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/small_merges.h"

namespace mergex::merging {
namespace {
namespace fs = std::filesystem;
using Catch::Contains;
using io::DType;
using io::Json;
using test::SmallMerge;

void flip_bit(const fs::path& path, std::streamoff from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-from_end, std::ios::end);
  file.put(byte);
}

template <class T>
void write_checkpoint(const fs::path& folder, DType dtype,
                      const std::vector<std::pair<std::string, std::vector<T>>>& tensors) {
  fs::create_directories(folder);
  io::write_file(folder / "config.json", "{}\n");
  std::vector<io::TensorView> views;
  for (const auto& [name, values] : tensors) {
    views.push_back({.name = name,
                     .dtype = dtype,
                     .shape = {static_cast<std::int64_t>(values.size())},
                     .bytes = std::as_bytes(std::span(values))});
  }
  io::write_safetensors(folder / "model.safetensors", views);
}

}  // namespace

TEST_CASE("digests of tensors are XXH3-128 of the digests of blocks", "[merging][golden]") {
  // python-xxhash 4.1.0 (xxHash 0.8.4): xxh3_128 of the concatenated xxh3_128 of pieces of 1 MiB.
  const std::pair<std::size_t, std::string> cases[] = {
      {0, "99aa06d3014798d86001c324468d497f"},       {1, "de68429b8afe28ce97cda390d38d6d2b"},
      {1000, "cd2f294d4b8ea00f6d6fa925d812c333"},    {1048576, "ed44dd605f8310612c6b48381c139ed9"},
      {1048577, "021afc0dba865a91f52617c21e52b27b"}, {3145733, "8e95a03cdc87285ada0e28c23567c541"}};
  for (const auto& [size, expected] : cases) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 % 251);
    CHECK(digest_of_tensor(bytes) == expected);
  }
}

TEST_CASE("a merged folder is checked against its manifest", "[merging]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .num_small = 4};
  merge.make_inputs();
  const auto plan = merge.plan();
  const auto out = folder / "out";
  execute(plan, {.out = out, .shard_bytes = 1'000'000, .threads = 2});
  const auto intact = verify(out, 2);
  CHECK(intact.problems == std::vector<std::string>{});
  CHECK(intact.num_tensors == plan.tensors.size());
  CHECK_THAT(intact.text(), Contains("are as they were written"));

  const auto only_problem = [&] {
    const auto found = verify(out, 3);
    REQUIRE(found.problems.size() == 1);
    CHECK_THAT(found.text(), Contains(found.problems[0]));
    return found.problems[0];
  };
  const auto index = io::read_json(out / "model.safetensors.index.json");
  const auto shard = out / index["weight_map"]["long.f32"].get<std::string>();
  SECTION("one bit of a tensor") {
    flip_bit(shard, 1);
    CHECK_THAT(only_problem(), Contains(shard.filename().string()) && Contains("is damaged"));
  }
  SECTION("a file beside the weights") {
    flip_bit(out / "1_Pooling/config.json", 1);
    CHECK(only_problem() == "1_Pooling/config.json: differs");
  }
  SECTION("a missing file") {
    fs::remove(out / "README.md");
    CHECK(only_problem() == "README.md: is missing");
  }
  SECTION("a file that came later") {
    test::write_text(out / "model-00009-of-00009.safetensors", "stale");
    CHECK(only_problem() == "model-00009-of-00009.safetensors: is not of the merge");
  }
  SECTION("a shard that was cut") {
    fs::resize_file(shard, fs::file_size(shard) - 1);
    CHECK_THAT(only_problem(), Contains("truncated"));
  }
  SECTION("no manifest") {
    fs::remove(out / "manifest.json");
    CHECK_THAT(test::user_error([&] { verify(out, 1); }), Contains("holds no manifest.json"));
  }
  SECTION("a manifest that leads out of the folder, or is none") {
    test::write_text(out / "manifest.json",
                     R"({"outputs": [{"file": "../a/config.json", "bytes": 3, "sha256": "0"}]})");
    CHECK_THAT(test::user_error([&] { verify(out, 1); }), Contains("expected a file of this folder"));
    for (const auto* text : {"[]", "{}", R"({"outputs": 3})", R"({"outputs": [3]})", R"({"outputs": [{"file": "x"}]})",
                             R"({"outputs": [{"file": "x", "bytes": 1, "tensors": [1]}]})",
                             R"({"outputs": [{"file": "x", "bytes": 1, "tensors": {"t": 1}}]})"}) {
      test::write_text(out / "manifest.json", text);
      CHECK_THAT(test::user_error([&] { verify(out, 1); }), Contains("no manifest of a merge"));
    }
  }
}

TEST_CASE("the manifest names inputs, outputs and the recipe", "[merging]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .long_tensor = 500, .num_small = 2};
  merge.make_inputs();
  const auto plan = merge.plan();
  execute(plan, {.out = folder / "out", .version = "9.9"});
  const auto manifest = io::read_json(folder / "out/manifest.json");
  CHECK(manifest["program"] == "mergex 9.9");
  CHECK(manifest["recipe"] == plan.resolved);
  REQUIRE(manifest["inputs"].size() == 3);
  const auto& a = manifest["inputs"][1];
  CHECK(a["model"] == "a");
  CHECK(a["files"][1]["file"] == "model.safetensors");
  CHECK(a["files"][1]["bytes"] == fs::file_size(folder / "a/model.safetensors"));
  CHECK(a["tensors"].size() == plan.tensors.size());
  CHECK(a["tensors"]["ids.i64"] == digest_of_tensor(plan.models[1].folder->find("ids.i64")->bytes));
  CHECK(!manifest["inputs"][0]["tensors"].contains("ids.i64"));  // was not read
  const io::CheckpointFolder merged(folder / "out");
  CHECK(manifest["outputs"][0]["tensors"]["long.f32"] == digest_of_tensor(merged.find("long.f32")->bytes));
}

TEST_CASE("differences of two checkpoints", "[merging]") {
  const test::TemporaryFolder folder;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  write_checkpoint<float>(
      folder / "a", DType::kF32,
      {{"same", {1, nan}}, {"little", {3, 4, 0}}, {"much", {1, 0}}, {"shape", {1}}, {"mine", {1}}, {"zero", {0}}});
  write_checkpoint<float>(folder / "b", DType::kF32,
                          {{"same", {1, nan}},
                           {"little", {3, 4, 0.5f}},
                           {"much", {0, 1}},
                           {"shape", {1, 2}},
                           {"yours", {1}},
                           {"zero", {-0.0f}}});
  const io::CheckpointFolder a(folder / "a"), b(folder / "b");
  for (const std::size_t threads : {1u, 3u}) {
    const auto found = diff(a, b, threads);
    CHECK(found.only_a == std::vector<std::string>{"mine"});
    CHECK(found.only_b == std::vector<std::string>{"yours"});
    CHECK(found.num_equal == 2);
    REQUIRE(found.differing.size() == 3);
    CHECK(found.differing[0].name == "shape");
    CHECK(!found.differing[0].has_same_shape());
    CHECK(found.differing[1].name == "much");
    CHECK(*found.differing[1].relative == Approx(std::sqrt(2.0)));
    CHECK(*found.differing[1].cosine == Approx(0.0));
    CHECK(found.differing[1].num_differing == 2);
    CHECK(found.differing[2].name == "little");
    CHECK(*found.differing[2].relative == Approx(0.1));
    CHECK(*found.differing[2].max_abs == Approx(0.5));
    CHECK(*found.differing[2].cosine == Approx(5.0 / std::sqrt(25.25)));
    CHECK(found.differing[2].num_differing == 1);
    CHECK_THAT(found.text(), Contains("only in the first: mine") && Contains("shape: [1] -> [2]") &&
                                 Contains("2 tensors equal, 3 differ"));
    CHECK(found.json()["differing"][2]["max_abs"] == 0.5);
  }
  CHECK(diff(a, a, 2).is_equal());
}

TEST_CASE("differences of integers and of types", "[merging]") {
  const test::TemporaryFolder folder;
  const std::int64_t large = (std::int64_t{1} << 53);
  write_checkpoint<std::int64_t>(folder / "a", DType::kI64, {{"ids", {large, 5}}, {"cast", {1, 2}}});
  write_checkpoint<std::int64_t>(folder / "b", DType::kI64, {{"ids", {large + 1, 5}}, {"cast", {1, 2}}});
  write_checkpoint<float>(folder / "c", DType::kF32, {{"ids", {0, 5}}, {"cast", {1, 2}}});
  const io::CheckpointFolder a(folder / "a"), b(folder / "b"), c(folder / "c");
  const auto found = diff(a, b, 1);
  REQUIRE(found.differing.size() == 1);
  CHECK(found.differing[0].num_differing == 1);  // though both are one number in float64
  const auto types = diff(a, c, 1);
  REQUIRE(types.differing.size() == 2);
  CHECK(types.differing[1].name == "cast");
  CHECK(types.differing[1].num_differing == 0);
  CHECK_THAT(types.text(), Contains("I64 -> F32"));
}

}  // namespace mergex::merging
