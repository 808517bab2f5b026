#include "io/torch_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "io/json.h"
#include "io/zip_archive.h"

namespace mergex::io {
namespace {

constexpr std::size_t kMaxPickleBytes = 100'000'000;  // as the header of a safetensors file
constexpr std::size_t kMaxValues = 8'000'000;         // 40,000 tensors make 900,000
constexpr std::string_view kConvert = "convert the checkpoint to safetensors with the program that wrote it";

struct StorageType {
  std::string_view name;
  DType dtype;
};

constexpr std::array kStorageTypes{
    StorageType{"FloatStorage", DType::kF32},     StorageType{"HalfStorage", DType::kF16},
    StorageType{"BFloat16Storage", DType::kBF16}, StorageType{"DoubleStorage", DType::kF64},
    StorageType{"LongStorage", DType::kI64},      StorageType{"IntStorage", DType::kI32},
    StorageType{"ShortStorage", DType::kI16},     StorageType{"CharStorage", DType::kI8},
    StorageType{"ByteStorage", DType::kU8},       StorageType{"BoolStorage", DType::kBool}};

/// What an instruction can leave on the stack. Owned by the reader, so that nothing is freed recursively.
struct Value {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kTuple,
    kList,
    kDict,
    kOrderedDictType,
    kRebuildTensor,
    kRebuildParameter,
    kStorageType,
    kStorage,
    kTensor
  };
  Kind kind = Kind::kNone;
  std::int64_t integer = 0;    // kInt; of a storage or its type: the index in kStorageTypes
  std::string_view text = {};  // kText; of a storage: its bytes
  std::vector<Value*> items = {};  // of a dict: key, value, ...; of a tensor: storage, offset, shape, strides
};

std::string_view kind_name(Value::Kind kind) {
  constexpr std::array<std::string_view, 14> kNames{"None",       "a bool", "an int",    "a float", "a text",
                                                    "a tuple",    "a list", "a dict",    "a type",  "a function",
                                                    "a function", "a type", "a storage", "a tensor"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string shown_text(std::string_view text) { return shown(Json(std::string(text.substr(0, 200)))); }

/// Runs the instructions of data.pkl that describe a state dict (pickle protocols 2 to 5).
class PickleReader {
 public:
  PickleReader(std::string_view pickle, const ZipArchive& archive, std::string prefix, std::string file)
      : pickle_(pickle), archive_(archive), prefix_(std::move(prefix)), file_(std::move(file)) {}

  const Value& run() {
    while (true) {
      const auto opcode = byte();
      if (opcode == '.') {
        if (stack_.size() != 1) damaged("it ends with a stack of {} values, expected one", stack_.size());
        return *stack_.back();
      }
      step(opcode);
    }
  }

 private:
  using Kind = Value::Kind;

  template <class... Args>
  [[noreturn]] void damaged(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: data.pkl: {}; {}", file_, fmt::format(format, std::forward<Args>(args)...), kConvert);
  }

  // --- bytes

  std::string_view take(std::uint64_t count) {
    if (count > pickle_.size() - at_) damaged("it ends in the middle of an instruction");
    const auto taken = pickle_.substr(at_, count);
    at_ += count;
    return taken;
  }
  unsigned char byte() { return static_cast<unsigned char>(take(1)[0]); }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const auto end = pickle_.find('\n', at_);
    if (end == std::string_view::npos) damaged("it ends in the middle of an instruction");
    const auto taken = take(end - at_);
    take(1);
    return taken;
  }

  // --- stack

  Value* make(Value value) {
    if (values_.size() >= kMaxValues) damaged("it makes more than {} values", kMaxValues);
    return &values_.emplace_back(std::move(value));
  }
  void push(Value value) { stack_.push_back(make(std::move(value))); }
  void push_integer(std::int64_t value) { push({.kind = Kind::kInt, .integer = value}); }
  void push_float() {
    take(8);  // no tensor depends on its value
    push({.kind = Kind::kFloat});
  }
  void push_text(std::string_view text) {
    if (!is_valid_utf8(text)) damaged("a text is not valid UTF-8");
    push({.kind = Kind::kText, .text = text});
  }
  Value* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) damaged("it takes a value from an empty stack");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  Value& top() {
    auto* value = pop();
    stack_.push_back(value);
    return *value;
  }
  Value& top(Kind kind) {
    if (top().kind != kind) damaged("it changes {}, expected {}", kind_name(top().kind), kind_name(kind));
    return top();
  }
  std::vector<Value*> pop_to_mark() {
    if (marks_.empty()) damaged("it takes values from an empty stack");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void push_tuple(std::size_t count) {
    std::vector<Value*> items(count);
    for (auto i = count; i-- > 0;) items[i] = pop();
    push({.kind = Kind::kTuple, .items = std::move(items)});
  }
  void append(Value& container, const std::vector<Value*>& items) {
    container.items.insert(container.items.end(), items.begin(), items.end());
  }

  // --- memo

  void store(std::uint64_t index) {
    // Pickle numbers its memo without gaps; a file with large numbers alone would cost their memory.
    if (index >= kMaxValues) damaged("it remembers value number {}", index);
    if (index >= memo_.size()) memo_.resize(index + 1, nullptr);
    memo_[index] = &top();
  }
  void load(std::uint64_t index) {
    if (index >= memo_.size() || memo_[index] == nullptr) {
      damaged("it recalls value number {}, which it never stored", index);
    }
    stack_.push_back(memo_[index]);
  }

  // --- instructions, by the names of Python's pickletools

  void step(unsigned char opcode) {
    switch (opcode) {
      case 0x80: {  // PROTO
        const auto protocol = byte();
        if (protocol < 2 || protocol > 5) damaged("pickle protocol {}, expected 2 to 5", protocol);
        return;
      }
      case 0x95: number<std::uint64_t>(); return;                    // FRAME
      case '(': marks_.push_back(stack_.size()); return;             // MARK
      case '0': pop(); return;                                       // POP
      case 'N': push({}); return;                                    // NONE
      case 0x88: push({.kind = Kind::kBool, .integer = 1}); return;  // NEWTRUE
      case 0x89: push({.kind = Kind::kBool}); return;                // NEWFALSE
      case 'J': push_integer(number<std::int32_t>()); return;        // BININT
      case 'K': push_integer(number<std::uint8_t>()); return;        // BININT1
      case 'M': push_integer(number<std::uint16_t>()); return;       // BININT2
      case 0x8A: push_long(); return;                                // LONG1
      case 'G': push_float(); return;                                          // BINFLOAT
      case 0x8C: push_text(take(byte())); return;                              // SHORT_BINUNICODE
      case 'X': push_text(take(number<std::uint32_t>())); return;              // BINUNICODE
      case 0x8D: push_text(take(number<std::uint64_t>())); return;             // BINUNICODE8
      case ')': push({.kind = Kind::kTuple}); return;                          // EMPTY_TUPLE
      case 0x85: push_tuple(1); return;                                        // TUPLE1
      case 0x86: push_tuple(2); return;                                        // TUPLE2
      case 0x87: push_tuple(3); return;                                        // TUPLE3
      case 't': push({.kind = Kind::kTuple, .items = pop_to_mark()}); return;  // TUPLE
      case ']': push({.kind = Kind::kList}); return;                           // EMPTY_LIST
      case '}': push({.kind = Kind::kDict}); return;                           // EMPTY_DICT
      case 'a': {                                                              // APPEND
        auto* item = pop();
        append(top(Kind::kList), {item});
        return;
      }
      case 'e': {  // APPENDS
        const auto items = pop_to_mark();
        append(top(Kind::kList), items);
        return;
      }
      case 's': {  // SETITEM
        auto* value = pop();
        auto* key = pop();
        append(top(Kind::kDict), {key, value});
        return;
      }
      case 'u': {  // SETITEMS
        const auto items = pop_to_mark();
        if (items.size() % 2 != 0) damaged("a dict has a key without a value");
        append(top(Kind::kDict), items);
        return;
      }
      case 'q': store(byte()); return;                   // BINPUT
      case 'r': store(number<std::uint32_t>()); return;  // LONG_BINPUT
      case 0x94: store(num_memoized_++); return;         // MEMOIZE
      case 'h': load(byte()); return;                    // BINGET
      case 'j': load(number<std::uint32_t>()); return;   // LONG_BINGET
      case 'c': {                                        // GLOBAL
        const auto module = line();
        push_global(module, line());
        return;
      }
      case 0x93: {  // STACK_GLOBAL
        const auto *name = pop(), *module = pop();
        if (name->kind != Kind::kText || module->kind != Kind::kText) damaged("a name is no text");
        push_global(module->text, name->text);
        return;
      }
      case 'Q': push_storage(*pop()); return;  // BINPERSID
      case 'R': reduce(); return;              // REDUCE
      case 'b': {                              // BUILD: attributes, as _metadata
        pop();
        top(Kind::kDict);
        return;
      }
      default: damaged("instruction 0x{:02X} at byte {} has no place in a state dict", opcode, at_ - 1);
    }
  }

  void push_long() {
    const auto digits = take(byte());
    if (digits.size() > 8) damaged("a number has {} bytes, expected at most 8", digits.size());
    std::uint64_t bits = !digits.empty() && (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;  // two's complement
    std::memcpy(&bits, digits.data(), digits.size());
    push_integer(static_cast<std::int64_t>(bits));
  }

  void push_global(std::string_view module, std::string_view name) {
    if (module == "collections" && name == "OrderedDict") return push({.kind = Kind::kOrderedDictType});
    if (module == "torch._utils" && name == "_rebuild_tensor_v2") return push({.kind = Kind::kRebuildTensor});
    if (module == "torch._utils" && name == "_rebuild_parameter") return push({.kind = Kind::kRebuildParameter});
    if (module == "torch") {
      const auto* found = std::ranges::find(kStorageTypes, name, &StorageType::name);
      if (found != kStorageTypes.end()) {
        return push({.kind = Kind::kStorageType, .integer = found - kStorageTypes.data()});
      }
    }
    fail("{}: data.pkl names {}, which a state dict of plain tensors does not need; nothing was run. If you trust its "
         "source, {}", file_, shown_text(fmt::format("{}.{}", module, name)), kConvert);
  }

  /// ("storage", type, key, device, number of elements)
  void push_storage(const Value& id) {
    constexpr std::array kKinds{Kind::kText, Kind::kStorageType, Kind::kText, Kind::kText, Kind::kInt};
    if (id.kind != Kind::kTuple || !std::ranges::equal(id.items, kKinds, {}, &Value::kind) ||
        id.items[0]->text != "storage") {
      damaged("a storage is not described by its type, name, device and size");
    }
    const auto name = prefix_ + "data/" + std::string(id.items[2]->text);
    const auto bytes = archive_.content(name);
    const auto type = id.items[1]->integer;
    const auto size = static_cast<std::int64_t>(dtype_size(kStorageTypes[static_cast<std::size_t>(type)].dtype));
    const auto num_elements = id.items[4]->integer;
    if (static_cast<std::int64_t>(bytes.size()) % size != 0 ||
        num_elements != static_cast<std::int64_t>(bytes.size()) / size) {
      damaged("storage {} holds {} bytes, expected {} elements of {} bytes", shown_text(name), bytes.size(),
              num_elements, size);
    }
    push(
        {.kind = Kind::kStorage, .integer = type, .text = {reinterpret_cast<const char*>(bytes.data()), bytes.size()}});
  }

  void reduce() {
    const auto* arguments = pop();
    const auto* function = pop();
    if (arguments->kind != Kind::kTuple) damaged("a function is called with {}", kind_name(arguments->kind));
    const auto& items = arguments->items;
    if (function->kind == Kind::kOrderedDictType && items.empty()) return push({.kind = Kind::kDict});
    if (function->kind == Kind::kRebuildParameter && !items.empty() && items[0]->kind == Kind::kTensor) {
      stack_.push_back(items[0]);  // the rest: whether it is trained, hooks
      return;
    }
    // storage, offset, shape, strides; the rest: whether it is trained, hooks, and flags of views that are not computed
    constexpr std::array kKinds{Kind::kStorage, Kind::kInt, Kind::kTuple, Kind::kTuple};
    if (function->kind == Kind::kRebuildTensor &&
        (items.size() == 6 || (items.size() == 7 && is_empty_dict(*items[6]))) &&
        std::ranges::equal(std::span(items).first(4), kKinds, {}, &Value::kind)) {
      return push({.kind = Kind::kTensor, .items = {items.begin(), items.begin() + 4}});
    }
    damaged("{} is called with arguments that it does not take", kind_name(function->kind));
  }

  static bool is_empty_dict(const Value& value) { return value.kind == Kind::kDict && value.items.empty(); }

  std::string_view pickle_;
  const ZipArchive& archive_;
  std::string prefix_, file_;
  std::size_t at_ = 0;
  std::deque<Value> values_;  // addresses stay
  std::vector<Value*> stack_, memo_;
  std::vector<std::size_t> marks_;
  std::uint64_t num_memoized_ = 0;
};

std::vector<std::int64_t> integers(const Value& tuple, const std::string& where, std::string_view what) {
  std::vector<std::int64_t> values;
  for (const auto* item : tuple.items) {
    if (item->kind != Value::Kind::kInt || item->integer < 0) {
      fail("{}: its {} are not all sizes; {}", where, what, kConvert);
    }
    values.push_back(item->integer);
  }
  return values;
}

/// Whether elements lie one after the other, the last dimension fastest.
bool is_contiguous(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  std::int64_t expected = 1;
  for (auto i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) continue;  // never stepped along
    if (strides[i] != expected) return false;
    expected *= shape[i];  // no overflow: the caller has multiplied them all
  }
  return true;
}

TensorView view_of(const Value& tensor, std::string name, const std::string& where) {
  const auto& storage = *tensor.items[0];
  const auto offset = tensor.items[1]->integer;
  TensorView view;
  view.name = std::move(name);
  view.dtype = kStorageTypes[static_cast<std::size_t>(storage.integer)].dtype;
  view.shape = integers(*tensor.items[2], where, "sizes");
  const auto strides = integers(*tensor.items[3], where, "strides");
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  std::int64_t num_elements = 1, bounded = size, begin = 0;
  for (const auto dimension : view.shape) {
    num_elements = dimension == 0 || num_elements == 0 ? 0 : num_elements * dimension;  // checked by `bounded`
    if (__builtin_mul_overflow(bounded, std::max<std::int64_t>(dimension, 1), &bounded)) {
      fail("{}: shape {} is too large; {}", where, shape_text(view.shape), kConvert);
    }
  }
  const auto available = static_cast<std::int64_t>(storage.text.size());
  if (strides.size() != view.shape.size() || offset < 0 || __builtin_mul_overflow(offset, size, &begin) ||
      begin > available || num_elements * size > available - begin) {
    fail("{}: {} elements from {} on do not lie in its storage of {} bytes; {}", where, shape_text(view.shape), offset,
         available, kConvert);
  }
  if (num_elements > 0 && !is_contiguous(view.shape, strides)) {
    fail("{}: stored in another order than by rows (strides {} for {}); save it again after .contiguous()", where,
         shape_text(strides), shape_text(view.shape));
  }
  view.bytes = std::as_bytes(std::span(storage.text))
                   .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(num_elements * size));
  return view;
}

}  // namespace

TorchFile TorchFile::open(const std::filesystem::path& path) {
  TorchFile opened;
  opened.path_ = path;
  opened.mapping_ = std::make_unique<MappedFile>(path, "a file of torch.save");
  opened.parse();
  return opened;
}

void TorchFile::parse() {
  const auto file = path_.string();
  const auto bytes = mapping_->bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("\x80\x02\x8a\x0a")) {  // the number with which torch.save began before 1.6
    fail("{}: written in the format of torch before 1.6; load and save it once with a newer torch: "
         "torch.save(torch.load(f), f)", file);
  }
  if (!text.starts_with("PK")) {
    fail("{}: {} bytes that begin no zip archive, expected a file of torch.save; download it again", file,
         bytes.size());
  }

  const ZipArchive archive(bytes, file);
  std::string prefix;
  int num_pickles = 0;
  for (const auto& [name, entry] : archive.entries()) {
    constexpr std::string_view kPickle = "data.pkl";
    if (name != kPickle && !name.ends_with("/data.pkl")) continue;
    prefix = name.substr(0, name.size() - kPickle.size());
    ++num_pickles;
  }
  if (num_pickles != 1) {
    fail("{}: holds {} files data.pkl, expected one; is it a file of torch.save?", file, num_pickles);
  }
  if (archive.contains(prefix + "byteorder") && archive.checked_text(prefix + "byteorder") == "big") {
    fail("{}: written on a big-endian machine; {}", file, kConvert);
  }
  const auto pickle = archive.checked_text(prefix + "data.pkl");
  if (pickle.size() > kMaxPickleBytes) {
    fail("{}: data.pkl has {} bytes, expected at most {}", file, pickle.size(), kMaxPickleBytes);
  }

  PickleReader reader(pickle, archive, prefix, file);
  const auto& root = reader.run();
  if (root.kind != Value::Kind::kDict) {
    fail("{}: holds {}, expected a state dict; save model.state_dict()", file, kind_name(root.kind));
  }
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < root.items.size(); i += 2) {
    const auto &key = *root.items[i], &value = *root.items[i + 1];
    if (key.kind != Value::Kind::kText) {
      fail("{}: a key of the state dict is {}, expected a text", file, kind_name(key.kind));
    }
    const auto where = fmt::format("{}: tensor {}", file, shown_text(key.text));
    if (value.kind != Value::Kind::kTensor) {
      fail("{}: holds {}, expected a tensor; save the state dict alone: torch.save(model.state_dict(), f)", where,
           kind_name(value.kind));
    }
    if (!names.insert(key.text).second) fail("{}: given twice; {}", where, kConvert);
    tensors_.push_back(view_of(value, std::string(key.text), where));
  }
}

}  // namespace mergex::io
