#define MERGEX_VECTOR_BYTES 16
#define MERGEX_VECTOR_NAME "plain"
#include "kernels/vector_kernels.inc"

namespace mergex::kernels {

extern const VectorKernels<float> kPlainFloat;
extern const VectorKernels<double> kPlainDouble;
const VectorKernels<float> kPlainFloat = kKernels<float>;
const VectorKernels<double> kPlainDouble = kKernels<double>;

}  // namespace mergex::kernels
