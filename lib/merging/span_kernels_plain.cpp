#define MERGEX_VECTOR_BYTES 16
#define MERGEX_VECTOR_NAME "plain"
#include "merging/span_kernels.inc"

namespace mergex::merging {

extern const SpanKernels<float> kPlainFloat;
extern const SpanKernels<double> kPlainDouble;
const SpanKernels<float> kPlainFloat = kKernels<float>;
const SpanKernels<double> kPlainDouble = kKernels<double>;

}  // namespace mergex::merging
