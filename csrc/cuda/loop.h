// Rounds without the host: graphs that have been captured, in a graph that repeats them while a word on the device says so.
//
//     open; set the condition; WHILE (condition) { round; again; set the condition }
//
// `open` and `again` are kernels of ours (triton_kernels/rounds.py), which write the word. Only code that the driver
// links with the device runtime can set a node's condition from it; so that one kernel is here, as PTX, which the driver
// compiles when the graph is made.
#pragma once

#include <vector>

#include "driver.h"

namespace ppsd::cuda {

constexpr int kKernelNode = 0, kChildNode = 4, kConditionalNode = 13, kWhile = 1;
constexpr unsigned kAssignAtLaunch = 1;   // the condition's first value is assigned at every launch

// A twin of CUDA's CUgraphNodeParams.
struct NodeParams {
  struct Kernel {
    Function function;
    unsigned grid[3], block[3], shared_bytes;
    void **arguments, **extra;
    void* kernel;
    Context context;
  };
  struct Child {
    Graph graph;      // is copied
    long long rest;   // whose it is from CUDA 13 on; 0: it is copied
  };
  struct Conditional {
    Condition condition;
    int type;
    unsigned size;
    Graph* bodies;   // the driver's
    Context context;
  };
  int type = 0;
  int reserved0[3] = {};
  union {
    long long reserved1[29] = {};
    Kernel kernel;
    Child child;
    Conditional conditional;
  };
  long long reserved2 = 0;
};

// A kernel of one thread: (condition, address of a word) sets the condition to the word.
extern const char* const kSetCondition;       // its name,
extern const char* const kSetConditionCode;   // and PTX

class Loop {
 public:
  // body: the graphs of one round, in their order. word: what `open` and `again` write, int32; other than 0 is go on.
  // Throws DriverError: of kTooOld where the driver knows no conditional nodes.
  Loop(int device, const std::vector<Graph>& body, Graph open, Graph again, Address word);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  GraphExec exec() const { return exec_; }

 private:
  void make(const std::vector<Graph>& body, Graph open, Graph again, Address word);
  // Behind what was added to this graph before.
  GraphNode add(Graph graph, GraphNode before, NodeParams* params) const;
  GraphNode add_child(Graph graph, GraphNode before, Graph child) const;
  GraphNode add_setting(Graph graph, GraphNode before, Condition condition, Address word) const;
  void release();

  Device device_ = 0;
  Context context_ = nullptr;
  Module module_ = nullptr;
  Function set_condition_ = nullptr;
  Graph graph_ = nullptr;
  GraphExec exec_ = nullptr;
};

}  // namespace ppsd::cuda
