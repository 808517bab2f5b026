#include <torch/torch.h>

#include <cstdlib>
#include <new>

#include "command_options.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "finetune.h"
#include "listing.h"
#include "tensor/block_allocator.h"

extern "C" int mergex_engine_run(const mergex::CommandOptions* options) {
  using namespace mergex;
  log::set_level(options->verbosity < 0 ? log::Level::kWarn
                                        : options->verbosity > 0 ? log::Level::kDebug : log::Level::kInfo);
  install_signal_handlers();
  tensor::use_block_allocator();
  try {
    if (options->list) return engine::print_list();
    return engine::finetune(*options);
  } catch (const c10::OutOfMemoryError& error) {
    throw std::runtime_error(std::string("out of memory: ") + error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("out of memory");
  } catch (const c10::Error& error) {
    // Its what() carries a C++ stack of twenty lines, of use to us alone.
    if (std::getenv("MERGEX_TRACE") != nullptr) log::warn("{}", error.what());
    throw std::runtime_error(error.what_without_backtrace());
  }
}
