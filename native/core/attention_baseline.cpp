#define PAGODA_LANES 4
#define PAGODA_ROWS 4
#define PAGODA_VECTORS 2
#include "core/attention_kernels.hpp"

namespace pagoda {

extern const AttentionKernels kAttentionBaseline;
const AttentionKernels kAttentionBaseline{"baseline", state_floats, scratch_floats, compute, finish};

}  // namespace pagoda
