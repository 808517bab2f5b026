#if defined(__x86_64__)

#define MERGEX_VECTOR_BYTES 32
#define MERGEX_VECTOR_NAME "avx2"
#include "merging/span_kernels.inc"

namespace mergex::merging {

extern const SpanKernels<float> kAvx2Float;
extern const SpanKernels<double> kAvx2Double;
const SpanKernels<float> kAvx2Float = kKernels<float>;
const SpanKernels<double> kAvx2Double = kKernels<double>;

}  // namespace mergex::merging

#endif
