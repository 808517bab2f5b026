#include <fmt/format.h>

#include <cstdio>
#include <new>
#include <system_error>

#include "command_line.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "engine_library.h"
#include "merge.h"

namespace {

int run(int argc, const char* const* argv) {
  const auto parsed = mergex::parse_command_line(argc, argv);
  if (const auto* text = std::get_if<std::string>(&parsed)) {
    fmt::print("{}", *text);
    return 0;
  }
  const auto& options = std::get<mergex::CommandOptions>(parsed);
  if (options.subcommand == "merge") return mergex::run_merge(options);
  return mergex::run_in_engine(options);
}

}  // namespace

int main(int argc, char** argv) try {
  return run(argc, argv);
} catch (const mergex::UserError& error) {
  fmt::print(stderr, "mergex: error: {}\n", error.what());
  return 2;
} catch (const mergex::GuardError& error) {
  fmt::print(stderr, "mergex: stopped: {}\n", error.what());
  return 3;
} catch (const mergex::Interrupted& stop) {
  fmt::print(stderr, "mergex: {}\n", stop.what());
  return stop.exit_code();
} catch (const std::bad_alloc&) {
  fmt::print(stderr, "mergex: out of memory\n");
  return 1;
} catch (const std::system_error& error) {  // a full disk, a folder that may not be written
  fmt::print(stderr, "mergex: error: {}\n", error.what());
  return 1;
} catch (const std::exception& error) {
  fmt::print(stderr, "mergex: internal error: {}\n", error.what());
  return 1;
}
