#include "merging/span_kernels.h"

namespace mergex::merging {

extern const SpanKernels<float> kPlainFloat;
extern const SpanKernels<double> kPlainDouble;
#if defined(__x86_64__)
extern const SpanKernels<float> kAvx512Float, kAvx2Float;
extern const SpanKernels<double> kAvx512Double, kAvx2Double;
#endif

namespace {

template <class T>
const SpanKernels<T>& pick(const SpanKernels<float>& f, const SpanKernels<double>& d) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return f;
  } else {
    return d;
  }
}

}  // namespace

template <class T>
const SpanKernels<T>* span_kernels(InstructionSet set) {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("fma");
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

template const SpanKernels<float>* span_kernels<float>(InstructionSet);
template const SpanKernels<double>* span_kernels<double>(InstructionSet);

}  // namespace mergex::merging
