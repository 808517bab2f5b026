#include "kernels/vector_kernels.h"

namespace mergex::kernels {

extern const VectorKernels<float> kPlainFloat;
extern const VectorKernels<double> kPlainDouble;
#if defined(__x86_64__)
extern const VectorKernels<float> kAvx512Float, kAvx2Float;
extern const VectorKernels<double> kAvx512Double, kAvx2Double;
#endif

namespace {

template <class T>
const VectorKernels<T>& pick(const VectorKernels<float>& f, const VectorKernels<double>& d) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return f;
  } else {
    return d;
  }
}

}  // namespace

template <class T>
const VectorKernels<T>* vector_kernels(InstructionSet set) {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == InstructionSet::kBest) {
    set = has_avx512 ? InstructionSet::kAvx512 : has_avx2 ? InstructionSet::kAvx2 : InstructionSet::kPlain;
  }
  if (set == InstructionSet::kAvx512) return has_avx512 ? &pick<T>(kAvx512Float, kAvx512Double) : nullptr;
  if (set == InstructionSet::kAvx2) return has_avx2 ? &pick<T>(kAvx2Float, kAvx2Double) : nullptr;
#else
  if (set == InstructionSet::kAvx512 || set == InstructionSet::kAvx2) return nullptr;
#endif
  return &pick<T>(kPlainFloat, kPlainDouble);
}

template const VectorKernels<float>* vector_kernels<float>(InstructionSet);
template const VectorKernels<double>* vector_kernels<double>(InstructionSet);

}  // namespace mergex::kernels
