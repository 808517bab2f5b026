#if defined(__x86_64__)

#define MERGEX_VECTOR_BYTES 64
#define MERGEX_VECTOR_NAME "avx512"
#include "kernels/vector_kernels.inc"

namespace mergex::kernels {

extern const VectorKernels<float> kAvx512Float;
extern const VectorKernels<double> kAvx512Double;
const VectorKernels<float> kAvx512Float = kKernels<float>;
const VectorKernels<double> kAvx512Double = kKernels<double>;

}  // namespace mergex::kernels

#endif
