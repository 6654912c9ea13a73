#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/backend/sparse.h>
#include <trireme/comm/shm_tensors.h>

namespace trireme {

using c10d::OpType;
using Tensors = ShmBackend::Tensors;
using TensorLists = ShmBackend::TensorLists;
using WorkPtr = ShmBackend::WorkPtr;
using Use = ShmTensors::Use;

namespace {

// Returns what tells lists apart that hold as many elements in other tensors; 0 for one tensor.
uint64_t hash_of_list(const Tensors& tensors) {
  if (tensors.size() < 2) return 0;
  uint64_t hash = tensors.size();
  for (const at::Tensor& tensor : tensors)
    hash = shm::mix(hash, tensor.defined() ? static_cast<uint64_t>(tensor.numel()) : 0);
  return hash;
}

Tensors first_of(const TensorLists& lists) { return lists.empty() ? Tensors{} : lists.front(); }

// Returns the pieces of one rank alone in a list by rank, as would_read_results() wants it.
std::vector<shm::Pieces> only_of(int rank, shm::Pieces pieces) {
  std::vector<shm::Pieces> by_rank(static_cast<size_t>(rank) + 1);
  by_rank.back() = std::move(pieces);
  return by_rank;
}

}  // namespace

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!uses_memory()) return inner_->broadcast(tensors, options);
  ShmArguments arguments("broadcast");
  arguments.count("tensors", tensors.size(), 1);
  return broadcast_from({arguments, OpType::BROADCAST, "trireme:broadcast", tensors, options},
                        options.rootRank);
}

WorkPtr ShmBackend::broadcast_coalesced(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return broadcast_from(
      {ShmArguments("broadcast"), OpType::BROADCAST, "trireme:broadcast", tensors, options},
      options.rootRank);
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!uses_memory()) return inner_->allreduce(tensors, options);
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
    return allreduce_sparse(tensors, options);
  ShmArguments arguments("all_reduce");
  arguments.take(tensors).count("tensors", tensors.size(), 1);
  return all_reduce({arguments, OpType::ALLREDUCE, "trireme:all_reduce", tensors, options},
                    options.reduceOp);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                        const c10d::AllreduceCoalescedOptions& options) {
  if (!uses_memory()) return inner_->allreduce_coalesced(tensors, options);
  ShmArguments arguments("all_reduce");
  arguments.take(tensors);
  return all_reduce(
      {arguments, OpType::ALLREDUCE_COALESCED, "trireme:all_reduce", tensors, options},
      options.reduceOp);
}

WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!uses_memory()) return inner_->allreduce(tensors, options);
  ShmArguments arguments("all_reduce");
  arguments.count("sparse tensors", tensors.size(), 1)
      .expect(options.reduceOp == c10d::ReduceOp::SUM,
              [] { return "a sparse tensor and another ReduceOp than SUM"; });
  return submit(
      {arguments, OpType::_ALLREDUCE_SPARSE, "trireme:all_reduce_sparse", tensors, options},
      [=](Call& call) { all_reduce_sparse(call.run, tensors[0], call.options); });
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!uses_memory()) return inner_->reduce(tensors, options);
  ShmArguments arguments("reduce");
  arguments.take(tensors).count("tensors", tensors.size(), 1).root(options.rootRank, getSize());
  const auto how = arguments.reduction(options.reduceOp);
  return submit({arguments, OpType::REDUCE, "trireme:reduce", tensors, options},
                [=, this](Call& call) {
                  const bool receives = options.rootRank == getRank();
                  ShmTensors memory(tensors, receives ? Use::kReadWrite : Use::kRead);
                  call.run.reduce(memory.pieces(), options.rootRank, how, call.options);
                  memory.write_back();
                });
}

WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) {
  if (!uses_memory()) return inner_->allgather(outputs, inputs, options);
  ShmArguments arguments("all_gather");
  arguments.take(inputs).count("inputs", inputs.size(), 1).count("lists", outputs.size(), 1);
  if (arguments.fine()) {
    arguments.take(outputs[0]).count("outputs", outputs[0].size(), getSize());
    if (arguments.fine())
      arguments.numel("the input", inputs[0].numel(),
                      outputs[0][static_cast<size_t>(getRank())].numel());
  }
  return submit({arguments, OpType::ALLGATHER, "trireme:all_gather", first_of(outputs), options},
                [=, this](Call& call) {
                  ShmTensors to(outputs[0], Use::kWrite);
                  ShmTensors from(inputs, Use::kRead);
                  const auto pieces = to.pieces_of_each();
                  if (would_read_results(pieces, only_of(getRank(), from.pieces())))
                    from.make_copies();
                  call.run.all_gather(pieces, from.pieces(), call.dtype, call.options);
                  to.write_back();
                });
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions& options) {
  if (!uses_memory()) return inner_->_allgather_base(output, input, options);
  Tensors outputs{output}, inputs{input};
  return all_gather_into(
      {ShmArguments("all_gather"), OpType::_ALLGATHER_BASE, "trireme:all_gather", outputs, options},
      outputs, inputs);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  if (!uses_memory()) return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
  return all_gather_into(
      {ShmArguments("all_gather"), OpType::COALESCED, "trireme:all_gather", outputs, options},
      outputs, inputs);
}

WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  if (!uses_memory()) return inner_->allgather_coalesced(outputs, inputs, options);
  ShmArguments arguments("all_gather");
  arguments.take(inputs).count("lists", outputs.size(), getSize());
  Tensors all;
  for (const Tensors& of_rank : outputs) {
    arguments.take(of_rank).count("tensors in a list", of_rank.size(),
                                  static_cast<int64_t>(inputs.size()));
    for (size_t i = 0; i < inputs.size() && arguments.fine(); ++i)
      arguments.numel("a tensor of a list", of_rank[i].numel(), inputs[i].numel());
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  Request request(arguments, OpType::ALLGATHER_COALESCED, "trireme:all_gather", all, options);
  request.list_hash = hash_of_list(inputs);
  return submit(std::move(request), [=, this](Call& call) {
    std::vector<ShmTensors> to;
    std::vector<shm::Pieces> pieces;
    for (const Tensors& of_rank : outputs) {
      to.emplace_back(of_rank, Use::kWrite);
      pieces.push_back(to.back().pieces());
    }
    ShmTensors from(inputs, Use::kRead);
    if (would_read_results(pieces, only_of(getRank(), from.pieces()))) from.make_copies();
    call.run.all_gather(pieces, from.pieces(), call.dtype, call.options);
    for (ShmTensors& of_rank : to) of_rank.write_back();
  });
}

WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                           const c10d::GatherOptions& options) {
  if (inner_) return inner_->gather(outputs, inputs, options);
  const bool receives = options.rootRank == getRank();
  ShmArguments arguments("gather");
  arguments.take(inputs).count("inputs", inputs.size(), 1).root(options.rootRank, getSize());
  arguments.count("lists of outputs", outputs.size(), receives ? 1 : 0);
  if (receives && arguments.fine()) {
    arguments.take(outputs[0]).count("outputs", outputs[0].size(), getSize());
    for (const at::Tensor& output : outputs[0])
      arguments.numel("an output", output.numel(), inputs[0].numel());
  }
  return submit({arguments, OpType::GATHER, "trireme:gather", first_of(outputs), options},
                [=, this](Call& call) {
                  ShmTensors to(receives ? outputs[0] : Tensors{}, Use::kWrite);
                  ShmTensors from(inputs, Use::kRead);
                  const auto pieces = to.pieces_of_each();
                  if (would_read_results(pieces, only_of(getRank(), from.pieces())))
                    from.make_copies();
                  call.run.one_host().gather(pieces, from.pieces(), options.rootRank, call.dtype,
                                             call.options);
                  to.write_back();
                });
}

WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ScatterOptions& options) {
  if (inner_) return inner_->scatter(outputs, inputs, options);
  const bool sends = options.rootRank == getRank();
  ShmArguments arguments("scatter");
  arguments.take(outputs).count("outputs", outputs.size(), 1).root(options.rootRank, getSize());
  arguments.count("lists of inputs", inputs.size(), sends ? 1 : 0);
  if (sends && arguments.fine()) {
    arguments.take(inputs[0]).count("inputs", inputs[0].size(), getSize());
    for (const at::Tensor& input : inputs[0])
      arguments.numel("an input", input.numel(), outputs[0].numel());
  }
  return submit({arguments, OpType::SCATTER, "trireme:scatter", outputs, options}, [=](Call& call) {
    ShmTensors to(outputs, Use::kWrite);
    const ShmTensors from(sends ? inputs[0] : Tensors{}, Use::kRead);
    call.run.one_host().scatter(to.pieces(), from.pieces_of_each(), options.rootRank, call.dtype,
                                call.options);
    to.write_back();
  });
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  if (!uses_memory()) return inner_->reduce_scatter(outputs, inputs, options);
  ShmArguments arguments("reduce_scatter");
  arguments.take(outputs).count("outputs", outputs.size(), 1).count("lists", inputs.size(), 1);
  if (arguments.fine()) {
    arguments.take(inputs[0]).count("inputs", inputs[0].size(), getSize());
    if (arguments.fine())
      arguments.numel("the output", outputs[0].numel(),
                      inputs[0][static_cast<size_t>(getRank())].numel());
  }
  const auto how = arguments.reduction(options.reduceOp);
  return submit({arguments, OpType::REDUCE_SCATTER, "trireme:reduce_scatter", outputs, options},
                [=, this](Call& call) {
                  ShmTensors to(outputs, Use::kWrite);
                  ShmTensors from(inputs[0], Use::kRead);
                  if (would_read_results(only_of(getRank(), to.pieces()), from.pieces_of_each()))
                    from.make_copies();
                  call.run.reduce_scatter(to.pieces(), from.pieces_of_each(), how, call.options);
                  to.write_back();
                });
}

WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  if (!uses_memory()) return inner_->_reduce_scatter_base(output, input, options);
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_from({ShmArguments("reduce_scatter"), OpType::_REDUCE_SCATTER_BASE,
                              "trireme:reduce_scatter", outputs, options},
                             outputs, inputs, options.reduceOp);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  if (!uses_memory()) return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  return reduce_scatter_from({ShmArguments("reduce_scatter"), OpType::COALESCED,
                              "trireme:reduce_scatter", outputs, options},
                             outputs, inputs, options.reduceOp);
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                             const c10d::AllToAllOptions& options) {
  if (inner_) return inner_->alltoall(outputs, inputs, options);
  ShmArguments arguments("all_to_all");
  arguments.take(inputs).take(outputs).count("inputs", inputs.size(), getSize());
  arguments.count("outputs", outputs.size(), getSize());
  return submit({arguments, OpType::ALLTOALL, "trireme:all_to_all", outputs, options},
                [=](Call& call) {
                  ShmTensors to(outputs, Use::kWrite);
                  ShmTensors from(inputs, Use::kRead);
                  if (would_read_results(to.pieces_of_each(), from.pieces_of_each()))
                    from.make_copies();
                  call.run.one_host().all_to_all(to.pieces_of_each(), from.pieces_of_each(),
                                                 call.dtype, call.options);
                  to.write_back();
                });
}

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                  Splits& input_splits, const c10d::AllToAllOptions& options) {
  if (inner_) return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  ShmArguments arguments("all_to_all");
  arguments.take(input).take(output);
  const auto out = arguments.split_numels("the output", output, output_splits, getSize());
  const auto in = arguments.split_numels("the input", input, input_splits, getSize());
  return submit(
      {arguments, OpType::ALLTOALL_BASE, "trireme:all_to_all", {output}, options}, [=](Call& call) {
        ShmTensors to(output, Use::kWrite);
        ShmTensors from(input, Use::kRead);
        if (would_read_results(to.ranges(out), from.ranges(in))) from.make_copies();
        call.run.one_host().all_to_all(to.ranges(out), from.ranges(in), call.dtype, call.options);
        to.write_back();
      });
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  if (!uses_memory()) return inner_->barrier(options);
  return submit({ShmArguments("barrier"), OpType::BARRIER, "trireme:barrier", {}, options},
                [](Call& call) { call.run.barrier(call.options); });
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  if (inner_) return inner_->monitoredBarrier(options, wait_all_ranks);
  c10d::BarrierOptions here = options;
  here.asyncOp = false;
  if (!wait_all_ranks) {
    barrier(here)->wait();
    return;
  }
  submit({ShmArguments("barrier"), OpType::BARRIER, "trireme:barrier", {}, here}, [](Call& call) {
    call.run.one_host().roll_call(call.options);
  })->wait();
}

WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  if (inner_) return inner_->send(tensors, destination, tag);
  return p2p_->send(tensors, {destination, tag, options_->timeout});
}

WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  if (inner_) return inner_->recv(tensors, source, tag);
  return p2p_->recv(tensors, {source, tag, options_->timeout});
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  if (inner_) return inner_->recvAnysource(tensors, tag);
  return p2p_->recv(tensors, {std::nullopt, tag, options_->timeout});
}

WorkPtr ShmBackend::broadcast_from(Request request, int64_t root) {
  request.arguments.take(request.outputs).root(root, getSize());
  Tensors tensors = request.outputs;
  return submit(std::move(request), [=, this, tensors = std::move(tensors)](Call& call) {
    ShmTensors memory(tensors, root == getRank() ? Use::kRead : Use::kWrite);
    call.run.broadcast(memory.pieces(), root, call.dtype, call.options);
    memory.write_back();
  });
}

WorkPtr ShmBackend::all_reduce(Request request, const c10d::ReduceOp& op) {
  const auto how = request.arguments.reduction(op);
  request.list_hash = hash_of_list(request.outputs);
  Tensors tensors = request.outputs;
  return submit(std::move(request), [how, tensors = std::move(tensors)](Call& call) {
    ShmTensors memory(tensors, Use::kReadWrite);
    call.run.all_reduce(memory.pieces(), how, call.options);
    memory.write_back();
  });
}

// Gathers, into outputs[i], inputs[i] of each rank, rank by rank.
WorkPtr ShmBackend::all_gather_into(Request request, const Tensors& outputs,
                                    const Tensors& inputs) {
  ShmArguments& arguments = request.arguments;
  arguments.take(outputs).take(inputs).expect(outputs.size() == inputs.size(),
                                              [] { return "lists of different lengths"; });
  for (size_t i = 0; i < inputs.size() && arguments.fine(); ++i)
    arguments.numel("an output", outputs[i].numel(), inputs[i].numel() * getSize());
  request.list_hash = hash_of_list(inputs);
  return submit(std::move(request), [=, this](Call& call) {
    std::vector<ShmTensors> to;
    std::vector<shm::Pieces> by_rank(static_cast<size_t>(getSize()));
    for (const at::Tensor& output : outputs) {
      to.emplace_back(output, Use::kWrite);
      to.back().add_parts(by_rank);
    }
    ShmTensors from(inputs, Use::kRead);
    if (would_read_results(by_rank, only_of(getRank(), from.pieces()))) from.make_copies();
    call.run.all_gather(by_rank, from.pieces(), call.dtype, call.options);
    for (ShmTensors& output : to) output.write_back();
  });
}

// Reduces inputs[i], which holds the part of each rank for its outputs[i], rank by rank.
WorkPtr ShmBackend::reduce_scatter_from(Request request, const Tensors& outputs,
                                        const Tensors& inputs, const c10d::ReduceOp& op) {
  ShmArguments& arguments = request.arguments;
  arguments.take(outputs).take(inputs).expect(outputs.size() == inputs.size(),
                                              [] { return "lists of different lengths"; });
  for (size_t i = 0; i < inputs.size() && arguments.fine(); ++i)
    arguments.numel("an input", inputs[i].numel(), outputs[i].numel() * getSize());
  request.list_hash = hash_of_list(inputs);
  const auto how = arguments.reduction(op);
  return submit(std::move(request), [=, this](Call& call) {
    std::vector<ShmTensors> from;
    for (const at::Tensor& input : inputs) from.emplace_back(input, Use::kRead);
    std::vector<shm::Pieces> by_rank;
    const auto divide = [&] {
      by_rank.assign(static_cast<size_t>(getSize()), {});
      for (const ShmTensors& input : from) input.add_parts(by_rank);
    };
    divide();
    ShmTensors to(outputs, Use::kWrite);
    if (would_read_results(only_of(getRank(), to.pieces()), by_rank)) {
      for (ShmTensors& input : from) input.make_copies();
      divide();
    }
    call.run.reduce_scatter(to.pieces(), by_rank, how, call.options);
    to.write_back();
  });
}

}  // namespace trireme
