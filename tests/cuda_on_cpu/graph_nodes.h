// What capture.cc hands to graph.cc: the nodes of a graph, in the order in which they were captured.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "graph.h"

namespace cuda_on_cpu {

using Tips = std::vector<size_t>;  // numbers of nodes, ascending

struct Node {
  MakeTask make;
  Tips after;  // which all have lower numbers
};

cudaError_t begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode);
// Whatever it returns but cudaErrorIllegalState, …Unmatched and …WrongThread, the capture has ended.
cudaError_t end_capture(cudaStream_t stream, std::vector<Node>* nodes);

}  // namespace cuda_on_cpu
