// The driver's functions as csrc/cuda/driver.h declares them, against CUDA's own header: it is enough that this compiles.
// Built where the header is at hand; nothing else needs it.
#include <cuda.h>

#include <type_traits>

#undef cuGraphAddNode   // the one with edges, which CUDA 13 calls so too
#define cuGraphAddNode cuGraphAddNode_v2
#include "../cuda/loop.h"

namespace {

template <class Ours, class Theirs>
constexpr bool alike() {   // as arguments: handles are pointers to other types, enumerations are integers
  return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
}

template <class Ours, class Theirs>
struct Same;

template <class... Ours, class... Theirs>
struct Same<ppsd::cuda::Result (*)(Ours...), CUresult (*)(Theirs...)> {
  static constexpr bool value = sizeof...(Ours) == sizeof...(Theirs) && (alike<Ours, Theirs>() && ...);
};

#define PPSD_SAME(name, arguments) static_assert(Same<decltype(ppsd::cuda::Driver::name), decltype(&::name)>::value, #name);
PPSD_CUDA_FUNCTIONS(PPSD_SAME)
#if CUDA_VERSION >= 12030
PPSD_CUDA_LOOP_FUNCTIONS(PPSD_SAME)

using ppsd::cuda::NodeParams;
static_assert(sizeof(NodeParams) == sizeof(CUgraphNodeParams));
#define PPSD_AT(ours, theirs) static_assert(offsetof(NodeParams, ours) == offsetof(CUgraphNodeParams, theirs), #ours)
PPSD_AT(kernel.function, kernel.func);
PPSD_AT(kernel.grid, kernel.gridDimX);
PPSD_AT(kernel.block, kernel.blockDimX);
PPSD_AT(kernel.shared_bytes, kernel.sharedMemBytes);
PPSD_AT(kernel.arguments, kernel.kernelParams);
PPSD_AT(kernel.context, kernel.ctx);
PPSD_AT(child.graph, graph.graph);
PPSD_AT(conditional.condition, conditional.handle);
PPSD_AT(conditional.type, conditional.type);
PPSD_AT(conditional.size, conditional.size);
PPSD_AT(conditional.bodies, conditional.phGraph_out);
PPSD_AT(conditional.context, conditional.ctx);
#undef PPSD_AT
static_assert(ppsd::cuda::kKernelNode == CU_GRAPH_NODE_TYPE_KERNEL && ppsd::cuda::kChildNode == CU_GRAPH_NODE_TYPE_GRAPH);
static_assert(ppsd::cuda::kConditionalNode == CU_GRAPH_NODE_TYPE_CONDITIONAL && ppsd::cuda::kWhile == CU_GRAPH_COND_TYPE_WHILE);
static_assert(ppsd::cuda::kAssignAtLaunch == CU_GRAPH_COND_ASSIGN_DEFAULT);
#endif
#undef PPSD_SAME

static_assert(ppsd::cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && ppsd::cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ppsd::cuda::kNonBlocking == CU_STREAM_NON_BLOCKING && ppsd::cuda::kDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ppsd::cuda::kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ppsd::cuda::kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

}  // namespace
