#pragma once

#include <trireme/comm/communicator.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace trireme {

inline c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
  }
  TORCH_INTERNAL_ASSERT(false, "[comm] unknown ReduceOp");
}

}  // namespace trireme
