#define PAGODA_LANES 16
#define PAGODA_ROWS 6
#define PAGODA_VECTORS 4
#include "core/attention_kernels.hpp"

namespace pagoda {

extern const AttentionKernels kAttentionAvx512;
const AttentionKernels kAttentionAvx512{"avx512", state_floats, scratch_floats, compute, finish};

}  // namespace pagoda
