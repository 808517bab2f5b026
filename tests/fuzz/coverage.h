#pragma once

namespace mergex::fuzz {

/// Whether code ran since the last call that had not run before in this process. Always false in a build whose
/// readers are not instrumented (MERGEX_FUZZ is off): new messages alone guide then.
bool reached_new_code();

}  // namespace mergex::fuzz
