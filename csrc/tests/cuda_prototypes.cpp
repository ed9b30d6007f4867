// The driver's functions as csrc/cuda/driver.h declares them, against CUDA's own header: it is enough that this compiles.
// Built where the header is at hand; nothing else needs it.
#include <cuda.h>

#include <type_traits>

#include "../cuda/driver.h"

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
#undef PPSD_SAME

static_assert(ppsd::cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ppsd::cuda::kNonBlocking == CU_STREAM_NON_BLOCKING && ppsd::cuda::kDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ppsd::cuda::kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ppsd::cuda::kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

}  // namespace
