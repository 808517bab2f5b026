#if defined(__x86_64__)

#define MERGEX_VECTOR_BYTES 64
#define MERGEX_VECTOR_NAME "avx512"
#include "merging/span_kernels.inc"

namespace mergex::merging {

extern const SpanKernels<float> kAvx512Float;
extern const SpanKernels<double> kAvx512Double;
const SpanKernels<float> kAvx512Float = kKernels<float>;
const SpanKernels<double> kAvx512Double = kKernels<double>;

}  // namespace mergex::merging

#endif
