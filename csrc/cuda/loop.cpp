#include "loop.h"

namespace ppsd::cuda {

const char* const kSetCondition = "ppsd_set_condition";
const char* const kSetConditionCode = R"(
.version 7.0
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 condition, .param .b32 value);
.visible .entry ppsd_set_condition(.param .u64 condition, .param .u64 word)
{
  .reg .b32 %value;
  .reg .b64 %condition, %word;
  .param .b64 given_condition;
  .param .b32 given_value;
  ld.param.u64 %condition, [condition];
  ld.param.u64 %word, [word];
  ld.global.u32 %value, [%word];
  st.param.b64 [given_condition], %condition;
  st.param.b32 [given_value], %value;
  call.uni cudaGraphSetConditional, (given_condition, given_value);
  ret;
}
)";

Loop::Loop(int device, const std::vector<Graph>& body, Graph open, Graph again, Address word) {
  const Driver& cu = driver();
  if (!cu.has_loops())
    throw DriverError(Fault::kTooOld, "the NVIDIA driver is too old for a loop in a graph: it speaks CUDA " +
                                          version_text(cu.version) + ", and " + version_text(kLoopVersion) + " is needed");
  check(cu.cuDeviceGet(&device_, device), "finding the GPU");
  check(cu.cuDevicePrimaryCtxRetain(&context_, device_), "opening the GPU");
  try {
    make(body, open, again, word);
  } catch (...) {
    release();
    throw;
  }
}

Loop::~Loop() { release(); }

void Loop::make(const std::vector<Graph>& body, Graph open, Graph again, Address word) {
  const Driver& cu = driver();
  check(cu.cuCtxSetCurrent(context_), "choosing the GPU");
  check(cu.cuModuleLoadData(&module_, kSetConditionCode), "compiling what sets a condition");
  check(cu.cuModuleGetFunction(&set_condition_, module_, kSetCondition), "finding what sets a condition");
  check(cu.cuGraphCreate(&graph_, 0), "making a graph");
  Condition condition = 0;
  check(cu.cuGraphConditionalHandleCreate(&condition, graph_, context_, 0, kAssignAtLaunch), "making a condition");
  const GraphNode opened = add_setting(graph_, add_child(graph_, nullptr, open), condition, word);
  NodeParams params;
  params.type = kConditionalNode;
  params.conditional = {condition, kWhile, 1, nullptr, context_};
  add(graph_, opened, &params);
  const Graph round = params.conditional.bodies[0];
  GraphNode last = nullptr;
  for (Graph part : body) last = add_child(round, last, part);
  add_setting(round, add_child(round, last, again), condition, word);
  // Priorities do not matter: nothing runs beside a loop.
  check(cu.cuGraphInstantiateWithFlags(&exec_, graph_, 0), "instantiating a loop");
}

GraphNode Loop::add(Graph graph, GraphNode before, NodeParams* params) const {
  GraphNode node = nullptr;
  check(driver().cuGraphAddNode(&node, graph, &before, nullptr, before != nullptr, params), "adding to a graph");
  return node;
}

GraphNode Loop::add_child(Graph graph, GraphNode before, Graph child) const {
  NodeParams params;
  params.type = kChildNode;
  params.child = {child, 0};
  return add(graph, before, &params);
}

GraphNode Loop::add_setting(Graph graph, GraphNode before, Condition condition, Address word) const {
  void* arguments[] = {&condition, &word};   // read as the node is added
  NodeParams params;
  params.type = kKernelNode;
  params.kernel = {set_condition_, {1, 1, 1}, {1, 1, 1}, 0, arguments, nullptr, nullptr, nullptr};
  return add(graph, before, &params);
}

void Loop::release() {
  const Driver& cu = driver();
  cu.cuCtxSetCurrent(context_);   // what fails while tearing down has no one to tell
  if (exec_ != nullptr) cu.cuGraphExecDestroy(exec_);
  if (graph_ != nullptr) cu.cuGraphDestroy(graph_);
  if (module_ != nullptr) cu.cuModuleUnload(module_);
  cu.cuDevicePrimaryCtxRelease(device_);
}

}  // namespace ppsd::cuda
