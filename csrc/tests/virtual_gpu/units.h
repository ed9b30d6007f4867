// The parts of a multiprocessor that have files of their own: each binds the instructions that it knows.
#pragma once

#include "ptx.h"

namespace virtual_gpu {

bool bind_memory(Instruction& its);   // loads, stores, atomics, cp.async (load_store.cpp)
bool bind_matrix(Instruction& its);   // ldmatrix, stmatrix, mma, wgmma (matrix.cpp)

// What is under way to the registers or the shared memory of a warp and has not been waited for.
void end_copies(struct Warp& warp, int left);
void end_products(struct Warp& warp, int left);

}  // namespace virtual_gpu
