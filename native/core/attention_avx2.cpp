#define PAGODA_LANES 8
#define PAGODA_ROWS 6
#define PAGODA_VECTORS 2
#include "core/attention_kernels.hpp"

namespace pagoda {

extern const AttentionKernels kAttentionAvx2;
const AttentionKernels kAttentionAvx2{"avx2", state_floats, scratch_floats, compute, finish};

}  // namespace pagoda
