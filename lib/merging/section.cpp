#include "merging/section.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/suggest.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;

namespace {

constexpr std::array<std::pair<std::string_view, io::DType>, 4> kDTypes{{{"float32", io::DType::kF32},
                                                                         {"float16", io::DType::kF16},
                                                                         {"bfloat16", io::DType::kBF16},
                                                                         {"float64", io::DType::kF64}}};

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (const auto& [name, dtype] : kDTypes) names.emplace_back(name);
  return names;
}

class Reader {
 public:
  Reader(io::JsonObject object, Json given, RelativeTo relative_to, const std::map<std::string, fs::path>& named)
      : object_(std::move(object)), relative_to_(relative_to), named_(named) {
    section_.resolved = std::move(given);
  }

  MergeSection read() {
    section_.where = object_.where();
    const auto name = object_.required<std::string>("method");
    section_.method = &find_method(name, object_.where("method"));
    section_.dialect = static_cast<Dialect>(object_.choice("dialect", kDialectNames, 0));
    section_.filters = static_cast<FilterMatch>(object_.choice("filters", kFilterMatches, 1));
    keeps_padding_rows_ = object_.choice("padding_rows", kPaddingRows, 0) == 0;
    section_.missing = static_cast<MissingRule>(object_.choice("missing", kMissingRules, 0));
    section_.buffers_from_base = object_.choice("buffers", kBufferRules, 0) == 1;
    object_.optional("untie", section_.untie);
    section_.dtype = dtype("dtype");
    section_.out_dtype = dtype("out_dtype");
    if (object_.has("base_model") && !object_.peek("base_model").is_null()) {
      section_.base = model(object_, "base_model");
    } else {
      object_.any("base_model");
    }
    section_.parameters = ParameterLevel::read(object_, *section_.method, section_.filters, true);
    read_modules();
    read_tokenizer();
    object_.optional("chat_template", section_.chat_template);
    object_.finish();
    check();
    section_.resolved["dialect"] = kDialectNames[static_cast<std::size_t>(section_.dialect)];
    section_.resolved["filters"] = kFilterMatches[static_cast<std::size_t>(section_.filters)];
    section_.resolved["padding_rows"] = kPaddingRows[keeps_padding_rows_ ? 0 : 1];
    return std::move(section_);
  }

 private:
  inline static const std::vector<std::string> kFilterMatches{"substring", "parts"};
  inline static const std::vector<std::string> kPaddingRows{"keep", "drop"};
  inline static const std::vector<std::string> kMissingRules{"error", "available", "base"};
  inline static const std::vector<std::string> kBufferRules{"error", "base"};
  inline static const std::vector<std::string> kModules{"encoder", "decoder", "shared"};
  inline static const std::vector<std::string> kTokenKinds{"model_token", "zero"};

  std::optional<io::DType> dtype(std::string_view key) {
    if (object_.has(key) && object_.peek(key).is_null()) {
      object_.any(key);
      return std::nullopt;
    }
    const auto name = object_.maybe<std::string>(key);
    if (!name) return std::nullopt;
    const auto parsed = parse_torch_dtype(*name);
    if (!parsed) {
      object_.fail_value(key, fmt::format("expected {}{}", quoted_list(dtype_names()), did_you_mean(*name, dtype_names())));
    }
    return parsed;
  }

  fs::path absolute(const std::string& text, const std::string& where) const {
    if (const auto earlier = named_.find(text); earlier != named_.end()) return fs::absolute(earlier->second);
    const fs::path path = text;
    if (path.is_absolute()) return path.lexically_normal();
    const auto recipe_folder = fs::absolute(fs::path(where.substr(0, where.find('#')))).parent_path();
    std::error_code ignored;
    const auto beside_recipe = (recipe_folder / path).lexically_normal();
    if (relative_to_ == RelativeTo::kRecipe) return beside_recipe;
    const auto from_here = fs::absolute(path).lexically_normal();
    return fs::exists(from_here, ignored) || !fs::exists(beside_recipe, ignored) ? from_here : beside_recipe;
  }

  void check_folder(const fs::path& path, const std::string& text, const std::string& where) const {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) return;
    if (fs::exists(path, ignored)) fail("{}: {} is a file, expected the folder of a checkpoint", where, path.string());
    const bool is_hub_name = std::ranges::count(text, '/') == 1 && !text.starts_with('.') && !text.starts_with('/');
    fail("{}: got \"{}\", but there is no folder {}{}", where, text, path.string(),
         is_hub_name ? "; a model of a hub is downloaded first, and its folder named here" : "; check the path");
  }

  // "folder" or "folder+adapter"; the same pair is one model.
  std::size_t model_of(const std::string& text, const std::string& where) {
    if (text.empty()) fail("{}: is empty, expected the folder of a checkpoint", where);
    ModelReference reference{.text = text, .path = absolute(text, where)};
    std::error_code ignored;
    if (const auto plus = text.find('+'); plus != std::string::npos && !fs::exists(reference.path, ignored)) {
      if (plus == 0 || plus + 1 == text.size()) fail("{}: got \"{}\", expected folder+adapter", where, text);
      reference.path = absolute(text.substr(0, plus), where);
      reference.adapter = absolute(text.substr(plus + 1), where);
      check_folder(*reference.adapter, text.substr(plus + 1), where);
      check_folder(reference.path, text.substr(0, plus), where);
    }
    check_folder(reference.path, text, where);
    resolve_path(where, reference.path.string() + (reference.adapter ? "+" + reference.adapter->string() : ""));
    for (std::size_t i = 0; i < section_.models.size(); ++i) {
      if (section_.models[i].path == reference.path && section_.models[i].adapter == reference.adapter) return i;
    }
    section_.models.push_back(std::move(reference));
    return section_.models.size() - 1;
  }

  // `where` ends in the pointer of a path in the recipe.
  void resolve_path(const std::string& where, const std::string& path) {
    const Json::json_pointer place(where.substr(where.rfind("#/merge") + std::string_view("#/merge").size()));
    section_.resolved[place] = path;
  }

  std::size_t model(io::JsonObject& object, std::string_view key) {
    return model_of(object.required<std::string>(key), object.where(key));
  }

  SliceSource source(io::JsonObject object, bool has_layers) {
    SliceSource read{.model = model(object, "model"), .where = object.where()};
    if (has_layers) {
      std::vector<std::int64_t> range;
      if (!object.optional("layer_range", range, {.at_least = 0})) {
        fail("{}: \"layer_range\" is missing; give [first, end], the end not included", object.where());
      }
      if (range.size() != 2) object.fail_value("layer_range", "expected [first, end], the end not included");
      if (range[0] > range[1]) {
        object.fail_value("layer_range", fmt::format("which runs backwards; expected [{}, {}]?", range[1], range[0]));
      }
      read.layers = std::pair(range[0], range[1]);
    }
    if (section_.method->statistics != Method::Statistics::kNone) {
      const auto text = object.required<std::string>("statistics");
      read.statistics = absolute(text, object.where("statistics"));
      resolve_path(object.where("statistics"), read.statistics->string());
      std::error_code ignored;
      if (!fs::is_regular_file(*read.statistics, ignored)) {
        object.fail_value("statistics", fmt::format("but there is no file {}; expected a safetensors file", read.statistics->string()));
      }
    }
    read.parameters = ParameterLevel::read(object, *section_.method, section_.filters, false);
    object.finish();
    return read;
  }

  // Reads `models` or `slices` of the merge or of one module.
  void read_slices(io::JsonObject& object, Module& module) {
    if (object.has("models") == object.has("slices")) {
      fail("{}: expected either \"models\" or \"slices\"{}", object.where(), object.has("models") ? ", got both" : "");
    }
    if (object.has("models")) {
      Slice slice{.where = object.where("models")};
      for (auto& entry : object.objects("models")) slice.sources.push_back(source(entry, false));
      if (slice.sources.empty()) fail("{}: is empty; name at least one model", object.where("models"));
      module.slices.push_back(std::move(slice));
      return;
    }
    module.has_slices = true;
    for (auto& entry : object.objects("slices")) {
      Slice slice{.where = entry.where()};
      for (auto& given : entry.objects("sources")) slice.sources.push_back(source(given, true));
      if (slice.sources.empty()) fail("{}: \"sources\" is missing; name at least one model and its layers", slice.where);
      const auto length = [](const SliceSource& s) { return s.layers->second - s.layers->first; };
      for (const auto& given : slice.sources) {
        if (length(given) != length(slice.sources[0])) {
          fail("{}/layer_range: {} layers, expected {} as in the first source of this slice", given.where, length(given),
               length(slice.sources[0]));
        }
      }
      slice.parameters = ParameterLevel::read(entry, *section_.method, section_.filters, true);
      entry.finish();
      module.slices.push_back(std::move(slice));
    }
    if (module.slices.empty()) fail("{}: is empty; give at least one slice", object.where("slices"));
  }

  void read_modules() {
    const auto modules = object_.object("modules");
    if (!modules) {
      Module whole;
      read_slices(object_, whole);
      section_.modules.push_back(std::move(whole));
      return;
    }
    if (object_.has("models") || object_.has("slices")) {
      fail("{}: expected either \"modules\" or \"models\" and \"slices\"", object_.where());
    }
    auto all = *modules;
    if (auto whole = all.object("default")) {  // mergekit's name for a model of one part
      Module module;
      read_slices(*whole, module);
      module.parameters = ParameterLevel::read(*whole, *section_.method, section_.filters, true);
      whole->finish();
      all.finish();
      section_.modules.push_back(std::move(module));
      return;
    }
    for (const auto& name : kModules) {
      auto given = all.object(name);
      if (!given) fail("{}: \"{}\" is missing; give encoder, decoder and shared", all.where(), name);
      Module module{.name = name};
      read_slices(*given, module);
      module.parameters = ParameterLevel::read(*given, *section_.method, section_.filters, true);
      given->finish();
      section_.modules.push_back(std::move(module));
    }
    all.finish();
  }

  void read_tokenizer_source(io::JsonObject& object, std::string_view key) {
    const auto name = object.required<std::string>(key);
    if (name == "union") {
      section_.tokenizer->source = VocabularyOptions::Origin::kUnion;
    } else if (name == "base") {
      section_.tokenizer->source = VocabularyOptions::Origin::kBase;
    } else {
      section_.tokenizer->source = VocabularyOptions::Origin::kModel;
      section_.tokenizer->model = listed_model(name, object.where(key));
    }
  }

  // A model that the merge reads anyway.
  std::string listed_model(const std::string& text, const std::string& where) {
    const auto before = section_.models.size();
    const auto found = model_of(text, where);
    if (found == before) fail("{}: got \"{}\", which is none of the models of this merge", where, text);
    return section_.models[found].text;
  }

  void read_tokenizer() {
    if (object_.has("tokenizer_source") && object_.has("tokenizer")) {
      fail("{}: expected either \"tokenizer_source\" or \"tokenizer\"", object_.where());
    }
    const auto begin = [&](const char* key) {
      section_.tokenizer.emplace();
      section_.tokenizer->keep_padding_rows = keeps_padding_rows_;
      section_.tokenizer->where = object_.where(key);
    };
    if (object_.has("tokenizer_source") && object_.peek("tokenizer_source").is_null()) {
      object_.any("tokenizer_source");
    } else if (object_.has("tokenizer_source")) {
      begin("tokenizer_source");
      read_tokenizer_source(object_, "tokenizer_source");
    }
    auto block = object_.object("tokenizer");
    if (!block) return;
    begin("tokenizer");
    if (block->has("source")) read_tokenizer_source(*block, "source");
    if (block->has("pad_to_multiple_of") && block->peek("pad_to_multiple_of").is_null()) {
      block->any("pad_to_multiple_of");
    } else {
      section_.tokenizer->pad_to_multiple_of = block->maybe<std::int64_t>("pad_to_multiple_of", {.at_least = 1, .at_most = 1e6});
    }
    if (const auto tokens = block->any("tokens")) {
      if (!tokens->is_object()) block->fail_value("tokens", "expected an object of token: settings");
      for (const auto& [token, value] : tokens->items()) {
        section_.tokenizer->tokens.push_back(read_token(token, value, block->where("tokens", "/" + io::escape_pointer(token))));
      }
    }
    block->finish();
  }

  TokenRule read_token(const std::string& token, const Json& value, const std::string& where) {
    TokenRule rule{.token = token};
    if (!value.is_object() || !value.contains("source")) fail("{}: got {}, expected an object with \"source\"", where, io::shown(value));
    for (const auto& [key, member] : value.items()) {
      if (key != "source" && key != "force") {
        fail("{}/{}: unknown key{}", where, io::escape_pointer(key), did_you_mean(key, std::vector<std::string>{"source", "force"}));
      }
      if (key == "force") {
        if (!member.is_boolean()) fail("{}/force: got {}, expected true or false", where, io::shown(member));
        rule.force = member.get<bool>();
      }
    }
    const auto& source = value["source"];
    if (source.is_string()) {
      rule.kind = TokenRule::Kind::kModel;
      rule.model = listed_model(source.get<std::string>(), where + "/source");
      return rule;
    }
    if (!source.is_object()) fail("{}/source: got {}, expected a model or an object with \"kind\"", where, io::shown(source));
    const auto text = [&](const char* key) -> std::optional<std::string> {
      if (!source.contains(key)) return std::nullopt;
      if (!source[key].is_string()) fail("{}/source/{}: got {}, expected a string", where, key, io::shown(source[key]));
      return source[key].get<std::string>();
    };
    const auto kind = text("kind").value_or("");
    if (kind == "zero") {
      rule.kind = TokenRule::Kind::kZero;
      return rule;
    }
    if (kind != "model_token") {
      fail("{}/source/kind: got \"{}\", expected \"model_token\" or \"zero\"{}", where, kind, did_you_mean(kind, kTokenKinds));
    }
    rule.kind = TokenRule::Kind::kModelToken;
    const auto model = text("model");
    if (!model) fail("{}/source: \"model\" is missing", where);
    rule.model = listed_model(*model, where + "/source/model");
    rule.source_token = text("token").value_or("");
    if (source.contains("token_id")) {
      if (!source["token_id"].is_number_unsigned()) {
        fail("{}/source/token_id: got {}, expected a token's number", where, io::shown(source["token_id"]));
      }
      rule.source_id = source["token_id"].get<std::int64_t>();
    }
    if (rule.source_token.empty() == !rule.source_id) fail("{}/source: expected either \"token\" or \"token_id\"", where);
    return rule;
  }

  // What the method asks of models and base.
  void check() {
    const auto& method = *section_.method;
    if (method.base == Method::Base::kRequired && !section_.base) {
      fail("{}: \"base_model\" is missing, which the method {} needs; name the model that the others were trained from",
           section_.where, method.name);
    }
    for (const auto& module : section_.modules) {
      for (const auto& slice : module.slices) {
        auto count = slice.sources.size();
        const bool is_listed = std::ranges::any_of(slice.sources, [&](const SliceSource& s) { return s.model == section_.base; });
        if (section_.has_base_role() && is_listed) --count;
        const auto but_base = section_.has_base_role() ? " besides the base" : "";
        if (count < method.min_inputs) {
          fail("{}: {} {}{}, the method {} needs at least {}", slice.where, count, count == 1 ? "model" : "models",
               but_base, method.name, method.min_inputs);
        }
        if (count > method.max_inputs) {
          fail("{}: {} models{}, the method {} takes {}", slice.where, count, but_base, method.name,
               method.max_inputs == method.min_inputs ? std::to_string(method.max_inputs) : fmt::format("at most {}", method.max_inputs));
        }
      }
    }
  }

  io::JsonObject object_;
  RelativeTo relative_to_;
  const std::map<std::string, fs::path>& named_;
  bool keeps_padding_rows_ = true;
  MergeSection section_;
};

}  // namespace

std::optional<io::DType> parse_torch_dtype(std::string_view name) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  const auto* found = std::ranges::find(kDTypes, name, &std::pair<std::string_view, io::DType>::first);
  if (found == kDTypes.end()) return std::nullopt;
  return found->second;
}

std::string_view torch_dtype_name(io::DType dtype) {
  const auto* found = std::ranges::find(kDTypes, dtype, &std::pair<std::string_view, io::DType>::second);
  return found == kDTypes.end() ? std::string_view() : found->first;
}

MergeSection read_merge_section(io::JsonObject& root, RelativeTo relative_to, const std::map<std::string, fs::path>& named) {
  auto given = root.peek("merge");
  return Reader(root.required_object("merge"), std::move(given), relative_to, named).read();
}

}  // namespace mergex::merging
