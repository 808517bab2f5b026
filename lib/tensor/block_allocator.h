#pragma once

namespace mergex::tensor {

/// From now on tensors on the CPU of 1 MiB or more lie in blocks of their own, on huge pages where the system has them,
/// and a freed block serves the next tensor of about its size: a training step asks for the same sizes as the one
/// before, and fresh pages cost it about a sixth of its time. Blocks in use and kept ones together never exceed what was
/// in use at once before by more than an eighth; the block that was not used for longest goes first.
void use_block_allocator();

}  // namespace mergex::tensor
