#if defined(__x86_64__)

#define MERGEX_VECTOR_BYTES 32
#define MERGEX_VECTOR_NAME "avx2"
#include "kernels/vector_kernels.inc"

namespace mergex::kernels {

extern const VectorKernels<float> kAvx2Float;
extern const VectorKernels<double> kAvx2Double;
const VectorKernels<float> kAvx2Float = kKernels<float>;
const VectorKernels<double> kAvx2Double = kKernels<double>;

}  // namespace mergex::kernels

#endif
